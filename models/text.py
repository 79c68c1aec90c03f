"""Text policies: conversion of a family's captions to the tokens of its text encoders.

Captions are literal: brackets and `embedding:` are text, not weights or files to read. A caption with neither gets the
same tokens as from ComfyUI's own `clip.tokenize`.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..common.text import quantity
from .latents import POLICIES, LatentPolicy

# An identifier that no caption contains (NUL is removed from captions): core's tokenizer then finds no embeddings.
_NO_IDENTIFIER = "\0embedding:"

PLUS, FIRST_EDIT = EDIT_PROMPTS = ("plus (2509, 2511)", "first edit")
"""The templates that show control images to a text encoder, as nodes publish them."""

AS_COMFYUI = "as ComfyUI"
"""The `max_text_length` of captions that are neither cut nor padded otherwise than ComfyUI does."""

LADDER = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""The few lengths that captions are padded to if a model masks pads exactly, so that few graphs serve all."""

Tokens = dict[str, list[list[tuple[Any, float]]]]


@dataclass(frozen=True)
class CaptionTokens:
    """A tokenised caption.

    tokens: (token, weight) pairs by tokenizer, in the form that ComfyUI's `CLIP.encode_from_tokens` takes.
    length: tokens of the encoded sequence; None if unknown before encoding.
    dropped: number of tokens cut at the caption's end, because it exceeds the longest length.
    """

    tokens: Tokens
    length: int | None
    dropped: int = 0


class TextPolicy:
    """Tokenising and encoding of captions for one family.

    family: name in messages and in training data.
    encoder: ComfyUI's class of the text encoders.
    files: the text encoders to load, for messages.
    latents: the VAEs whose latents the models take.
    lengths: the numbers that `max_text_length` may be, ascending; empty if it has no effect.
    pictures_only: false if the models make video.
    takes_controls: whether the models take control images.
    edit_prompts: the templates that show control images to the encoder; empty if it sees none.
    whole_grids: true if the models run ComfyUI's own forward, which takes no ragged edge.
    """

    family: str
    encoder: ClassVar[type]
    files: ClassVar[str]
    latents: ClassVar[tuple[LatentPolicy, ...]]
    lengths: ClassVar[tuple[int, ...]] = ()
    pictures_only: ClassVar[bool] = True
    takes_controls: ClassVar[bool] = False
    edit_prompts: ClassVar[tuple[str, ...]] = ()
    whole_grids: ClassVar[bool] = False

    @property
    def sees_controls(self) -> bool:
        """Return whether the encoder reads a caption together with the control images."""
        return bool(self.edit_prompts)

    def tokenize(self, clip: Any, caption: str, max_length: int | None = None) -> CaptionTokens:
        """Tokenise a caption whole, as ComfyUI does; with a max_length, to the smallest of the `lengths` up to it that
        fits it, and cut at the longest."""
        raise NotImplementedError

    def tokenize_edit(
        self, clip: Any, caption: str, count: int, style: str, pictures: Sequence[Tensor] = ()
    ) -> CaptionTokens:
        """Tokenise a caption with `count` control images in the template `style`, one of `edit_prompts`.

        pictures: (1, H, W, 3) each, as returned by `resize_control`; without them their placeholder tokens stay.
        """
        raise NotImplementedError

    def resize_control(self, picture: Tensor, style: str) -> Tensor:
        """Resize a control image, (1, H, W, 3), to the size that the encoder sees."""
        raise NotImplementedError

    def control_tokens(self, style: str) -> int:
        """Estimate the tokens that one control image adds to a caption."""
        raise NotImplementedError

    def lengthened(self, clip: Any, caption: CaptionTokens, length: int) -> CaptionTokens:
        """Pad a caption to a greater one of the `lengths`."""
        raise NotImplementedError

    def outputs(self, length: int | None) -> Mapping[str, tuple[int | None, ...]] | None:
        """Return the shapes of an encoded caption by ComfyUI's names; None for any length. Returns None if all outputs
        are stored, whatever they are."""
        return {"cond": (1, length, None)}

    def collect(self, encoded: Mapping[str, Any], length: int | None) -> dict[str, Tensor]:
        """Select the outputs of an encoded caption to store, by name: `cond` is (1, L, D)."""
        outputs = self.outputs(length)
        assert outputs is not None
        assert encoded.get("attention_mask") is None or "attention_mask" in outputs
        assert length in (None, encoded["cond"].shape[1]), (encoded["cond"].shape, length)
        return {name: encoded[name] for name in outputs}

    def stop_text(self, clip: Any, caption: str) -> str | None:
        """Return the text in a caption at which the text encoder stops reading, or None."""
        return None

    def model_length(self, length: int) -> int:
        """Return the length of a caption of `length` encoded tokens as the model sees it."""
        return length

    def masks(self, length: int) -> bool:
        """Return whether the model gets a mask with captions of this length in its sequence, as they may have pads."""
        return False

    def shared_length(self, lengths: Sequence[int]) -> int:
        """Return the length that captions of these encoded tokens share in the model, as variants of one sample."""
        return self.model_length(max(lengths))

    def key(self, clip: Any) -> tuple[Any, ...]:
        """Return the cache key of everything that the encoding depends on besides weights, tokens and layer."""
        return ()

    def width(self, clip: Any) -> int:
        """Return the features per encoded token."""
        return inner_tokenizer(clip.tokenizer).embedding_size


def check_pair(text: TextPolicy, latents: LatentPolicy) -> None:
    """Raise ValueError if the text encoders and the VAE belong to different families. If either belongs to no family
    here, the MODEL decides."""
    if text.latents and latents in POLICIES and latents not in text.latents:
        fitting = " or ".join(policy.family for policy in text.latents)
        raise ValueError(
            f"The text encoders are for {text.family}, but the VAE is for {latents.family}; load the VAE of "
            f"{fitting}, or the text encoders that go with this VAE."
        )


def padded_length(length: int) -> int:
    """Round `length` tokens up to a step of the ladder; beyond it to a multiple of 1024."""
    assert length >= 1, length
    return next((step for step in LADDER if step >= length), -(-length // 1024) * 1024)


def cut_to(pairs: list[Any], length: int, suffix: int = 1) -> list[Any]:
    """Cut a caption's tokens to `length`, before the `suffix` tokens that end it."""
    return pairs if len(pairs) <= length else pairs[: length - suffix] + pairs[len(pairs) - suffix :]


def uncut_note(count: int, length: int, title: str) -> str:
    """Say that captions are longer than the model was trained with."""
    return (
        f"{quantity(count, 'caption has', 'captions have')} more than {length} tokens, the length that {title} was "
        f"trained with; ComfyUI samples them whole, and so they are trained. To cut them, set max_text_length to "
        f"{length} on Prepare Dataset."
    )


def escape_weights(caption: str) -> str:
    """Escape brackets and drop NUL: core reads `(red)` as a weight and `\\(` as a bracket."""
    return caption.replace("\0", "").replace("(", "\\(").replace(")", "\\)")


def inner_tokenizer(tokenizer: Any) -> Any:
    """Return the inner tokenizer of core's tokenizer for a single encoder."""
    return getattr(tokenizer, tokenizer.clip)


def literal_tokenizer(tokenizer: Any, names: Sequence[str]) -> Any:
    """Copy a tokenizer shallowly; its parts share everything but the search for embeddings."""
    literal = copy.copy(tokenizer)
    for name in names:
        part = copy.copy(getattr(tokenizer, name))
        find_no_embeddings(part)
        setattr(literal, name, part)
    return literal


def find_no_embeddings(part: Any) -> None:
    """Make a tokenizer for one encoder read `embedding:` as text."""
    part.embedding_identifier = _NO_IDENTIFIER
    part.embedding_directory = None

"""What captions are to each model family, as far as its text encoders tell: the lengths, and the exact tokens.

Captions are literal: brackets and `embedding:` are text, no weights, no files read. A caption with neither has the
tokens that ComfyUI's own `clip.tokenize` gives it.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import comfy.text_encoders.flux
import comfy.text_encoders.qwen_image
import comfy.text_encoders.wan
from torch import Tensor

from .latents import FLUX, FLUX2, WAN21, WAN22, LatentPolicy
from .text_lengths import padded_length

# An identifier that no caption holds (NUL is taken out of captions): core's tokenizer then finds no embeddings.
_NO_IDENTIFIER = "\0embedding:"

PLUS, FIRST_EDIT = EDIT_PROMPTS = ("plus (2509, 2511)", "first edit")
"""How Qwen-Image-Edit's models are told of their control pictures."""

Tokens = dict[str, list[list[tuple[Any, float]]]]


@dataclass(frozen=True)
class CaptionTokens:
    """A caption as token and weight pairs, in the form that ComfyUI's `CLIP.encode_from_tokens` takes.

    length: of the encoded sequence; None where it is known only once it is encoded.
    dropped: how many tokens were cut at the caption's end, because it is longer than the longest length.
    """

    tokens: Tokens
    length: int | None
    dropped: int = 0


class TextPolicy:
    """How the captions of one family are tokenised and encoded.

    family: in messages. latents: the VAEs whose latents its models take. files: the text encoders to load.
    lengths: the lengths that `max_text_length` chooses from, ascending; empty where the family has but one way.
    clips, controls: whether its models train on clips, and whether they take control pictures.
    """

    family: ClassVar[str]
    latents: ClassVar[tuple[LatentPolicy, ...]]
    files: ClassVar[str]
    lengths: ClassVar[tuple[int, ...]] = ()
    clips: ClassVar[bool] = False
    controls: ClassVar[bool] = False

    def tokenize(self, clip: Any, caption: str, max_length: int | None = None) -> CaptionTokens:
        raise NotImplementedError

    def lengthened(self, clip: Any, caption: CaptionTokens, length: int) -> CaptionTokens:
        """The same caption at a greater one of the `lengths`."""
        raise NotImplementedError

    def outputs(self, length: int | None) -> Mapping[str, tuple[int | None, ...]]:
        """What encoding a caption of that length gives, by ComfyUI's names, and the shapes (None: any length)."""
        return {"cond": (1, length, None)}

    def stop_text(self, clip: Any, caption: str) -> str | None:
        """The text in a caption at which the text encoder stops, if it holds one."""
        return None

    def model_length(self, length: int) -> int:
        """The length at which the model sees a caption of `length` encoded tokens."""
        return length

    def width(self, clip: Any) -> int:
        """Of an encoded token, in numbers."""
        return _part(clip.tokenizer).embedding_size


class Flux1Text(TextPolicy):
    """T5 padded with its pad token to 256 or 512, which the model attends to; CLIP-L in core's chunks of 77."""

    family, latents, controls = "FLUX.1", (FLUX,), True
    files = "clip_l and t5xxl with DualCLIPLoader, type flux"
    lengths = (256, 512)

    def tokenize(self, clip: Any, caption: str, max_length: int | None = None) -> CaptionTokens:
        """A caption takes the smallest of the lengths up to `max_length` that holds it, and is cut at the longest."""
        lengths = [length for length in self.lengths if max_length is None or length <= max_length]
        assert lengths, (self.lengths, max_length)
        tokenizer = _literal_tokenizer(clip.tokenizer, ("clip_l", "t5xxl"))
        # This replaces T5 options that a node may have set on the CLIP: lengths stay the few of the policy.
        tokens = tokenizer.tokenize_with_weights(_escaped(caption), tokenizer_options={"t5xxl_min_length": 0})
        (bare,) = tokens["t5xxl"]
        length = next((length for length in lengths if length >= len(bare)), lengths[-1])
        dropped = max(0, len(bare) - length)
        tokens["t5xxl"] = [bare[: length - 1] + bare[-1:] if dropped else bare]
        return self.lengthened(clip, CaptionTokens(tokens, len(tokens["t5xxl"][0]), dropped), length)

    def lengthened(self, clip: Any, caption: CaptionTokens, length: int) -> CaptionTokens:
        (pairs,) = caption.tokens["t5xxl"]
        padding = [(clip.tokenizer.t5xxl.pad_token, 1.0)] * (length - len(pairs))
        assert len(pairs) + len(padding) == length, (len(pairs), length)
        return CaptionTokens({**caption.tokens, "t5xxl": [pairs + padding]}, length, caption.dropped)

    def outputs(self, length: int | None) -> Mapping[str, tuple[int | None, ...]]:
        return {"cond": (1, length, None), "pooled_output": (1, None)}

    def width(self, clip: Any) -> int:
        return clip.tokenizer.t5xxl.embedding_size


class Flux2Text(TextPolicy):
    """Mistral (dev) or Qwen3 (klein) around the family's template, three layers of it side by side.

    Core pads what Mistral encodes with zeros on the left to 512, in the model; Qwen3's tokens are padded on the right.
    """

    family, latents, controls = "FLUX.2", (FLUX2,), True
    files = "mistral_3_small_flux2 (dev) or qwen_3 (klein) with CLIPLoader, type flux2"
    longest: ClassVar[int] = 512
    layers: ClassVar[int] = 3

    def tokenize(self, clip: Any, caption: str, max_length: int | None = None) -> CaptionTokens:
        """A caption of more than 512 tokens with its template is cut before the template's end."""
        name = clip.tokenizer.clip
        tokenizer = _literal_tokenizer(clip.tokenizer, (name,))
        tokens = tokenizer.tokenize_with_weights(_escaped(caption))
        (pairs,) = tokens[name]
        dropped = max(0, len(pairs) - self.longest)
        if dropped:
            part = _part(tokenizer)
            after = tokenizer.llama_template.split("{}")[1]
            kept = len(part.tokenizer(after)["input_ids"]) - part.tokens_start
            tokens[name] = [pairs[: self.longest - kept] + pairs[len(pairs) - kept :]]
        return CaptionTokens(tokens, len(pairs) - dropped, dropped)

    def outputs(self, length: int | None) -> Mapping[str, tuple[int | None, ...]]:
        return {"cond": (1, length, None), "attention_mask": (1, length)}

    def model_length(self, length: int) -> int:
        return max(self.longest, length)

    def width(self, clip: Any) -> int:
        return self.layers * super().width(clip)


class WanText(TextPolicy):
    """umT5 over exactly 512 tokens, zeros where there are none; the model attends to all."""

    family, latents, clips = "Wan", (WAN21, WAN22), True
    files = "umt5_xxl with CLIPLoader, type wan"
    longest: ClassVar[int] = 512

    def tokenize(self, clip: Any, caption: str, max_length: int | None = None) -> CaptionTokens:
        name = clip.tokenizer.clip
        tokenizer = _literal_tokenizer(clip.tokenizer, (name,))
        tokens = tokenizer.tokenize_with_weights(_escaped(caption))
        ((key, (pairs,)),) = tokens.items()
        dropped = max(0, len(pairs) - self.longest)
        tokens[key] = [pairs[: self.longest - 1] + pairs[-1:] if dropped else pairs]
        assert len(tokens[key][0]) == self.longest
        return CaptionTokens(tokens, self.longest, dropped)


class QwenImageText(TextPolicy):
    """Qwen2.5-VL around the family's template, unpadded; control pictures are seen by it as well."""

    family, latents, controls = "Qwen-Image", (WAN21,), True
    files = "qwen_2.5_vl_7b with CLIPLoader, type qwen_image"
    _picture: ClassVar[str] = "<|vision_start|><|image_pad|><|vision_end|>"

    def tokenize(self, clip: Any, caption: str, max_length: int | None = None) -> CaptionTokens:
        return CaptionTokens(self._tokens(clip, clip.tokenizer.llama_template, caption, ()), None)

    def tokenize_edit(
        self, clip: Any, caption: str, count: int, style: str, pictures: Sequence[Tensor] = ()
    ) -> CaptionTokens:
        """A caption with `count` control pictures, as core's TextEncodeQwenImageEditPlus (PLUS) or
        TextEncodeQwenImageEdit (FIRST_EDIT) tokenises them.

        pictures: (1, H, W, 3) each; without them their places are left as tokens.
        """
        template = clip.tokenizer.llama_template_images
        assert count and template.count(self._picture) == 1, (count, template)
        if style == PLUS:
            template = template.replace(self._picture, "")
            named = "".join(f"Picture {index + 1}: {self._picture}" for index in range(count))
        else:
            assert count == 1, count
            named = ""
        return CaptionTokens(self._tokens(clip, template, caption, pictures, named), None)

    def _tokens(self, clip: Any, template: str, caption: str, pictures: Sequence[Tensor], before: str = "") -> Tokens:
        name = clip.tokenizer.clip
        # The template is filled here: core leaves it out for a caption that begins as a template does.
        text = template.format(before + _escaped(caption))
        return _literal_tokenizer(clip.tokenizer, (name,)).tokenize_with_weights(text, images=list(pictures))

    def stop_text(self, clip: Any, caption: str) -> str | None:
        """Core masks all that comes from the pad token on, wherever it stands."""
        part = _part(clip.tokenizer)
        ((pairs,),) = self.tokenize(clip, caption).tokens.values()
        return part.inv_vocab[part.pad_token] if any(pair[0] == part.pad_token for pair in pairs) else None

    def model_length(self, length: int) -> int:
        return padded_length(length)


_ENCODERS: tuple[tuple[type, TextPolicy], ...] = (
    (comfy.text_encoders.flux.FluxClipModel, Flux1Text()),
    (comfy.text_encoders.flux.Flux2TEModel, Flux2Text()),
    (comfy.text_encoders.wan.WanT5Model, WanText()),
    (comfy.text_encoders.qwen_image.QwenImageTEModel, QwenImageText()),
)


def text_policy(clip: Any) -> TextPolicy:
    """The policy of the family whose text encoders these are; ValueError if no family that trains uses them."""
    if clip is None:
        raise ValueError(
            "The CLIP input is empty (the checkpoint holds no text encoders); load those of your model with CLIPLoader "
            "or DualCLIPLoader."
        )
    encoder = getattr(clip, "cond_stage_model", clip)
    for kind, policy in _ENCODERS:
        # Other models' encoders are subclasses of these, in modules of their own.
        if isinstance(encoder, kind) and type(encoder).__module__ == kind.__module__:
            return policy
    known = "; ".join(f"{policy.files} for {policy.family}" for _, policy in _ENCODERS)
    raise ValueError(
        f"The CLIP holds {_public_name(type(encoder))} text encoders, which no model that is trained here uses; load "
        f"one of these: {known}."
    )


def check_pair(text: TextPolicy, latents: LatentPolicy) -> None:
    """ValueError if the text encoders and the VAE are those of different families."""
    if latents not in text.latents:
        fitting = " or ".join(policy.family for policy in text.latents)
        raise ValueError(
            f"The text encoders are those of {text.family} and the VAE is that of {latents.family}; load the VAE of "
            f"{fitting}, or the text encoders that go with this VAE."
        )


def _public_name(kind: type) -> str:
    """Core wraps encoders in classes such as `SD3ClipModel_` made on the spot; their module tells the family."""
    return f"{kind.__name__.rstrip('_')} ({kind.__module__.rsplit('.', 1)[-1]})"


def _escaped(caption: str) -> str:
    """Core reads `(red)` as a weight and `\\(` as a bracket."""
    return caption.replace("\0", "").replace("(", "\\(").replace(")", "\\)")


def _part(tokenizer: Any) -> Any:
    """The one tokenizer inside a tokenizer of core for one encoder."""
    return getattr(tokenizer, tokenizer.clip)


def _literal_tokenizer(tokenizer: Any, names: Sequence[str]) -> Any:
    """A shallow copy of a tokenizer whose parts share everything but the search for embeddings."""
    literal = copy.copy(tokenizer)
    for name in names:
        part = copy.copy(getattr(tokenizer, name))
        part.embedding_identifier = _NO_IDENTIFIER
        part.embedding_directory = None
        setattr(literal, name, part)
    return literal

"""The captions of any text encoder that ComfyUI has, as the encoder itself makes them."""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from comfy.sd1_clip import SDClipModel
from torch import Tensor

from ..text import CaptionTokens, TextPolicy, find_no_embeddings

# Core reads `\(` as a bracket that is no weight: doubled, the backslash stays one.
_ESCAPED_BRACKET = re.compile(r"\\(?=[()])")


class CoreText(TextPolicy):
    """The text encoders of one CLIP: tokens, lengths and outputs are what `clip` itself gives for the caption.

    Captions are literal, whatever the tokenizer. Control images are not shown to the encoder.
    """

    latents, pictures_only, whole_grids = (), False, True

    def __init__(self, clip: Any):
        self.family = encoder_name(clip)
        literal = copy.copy(clip)
        literal.tokenizer = _literal(clip.tokenizer)
        # Most tokenizers take `\(` for `(`; some of one encoder (LongCat, Lens) never look for brackets.
        self._reads_escapes = literal.tokenize("\\(") == literal.tokenize("(")

    def tokenize(self, clip: Any, caption: str, max_length: int | None = None) -> CaptionTokens:
        literal = copy.copy(clip)
        literal.tokenizer = _literal(clip.tokenizer)
        text = caption.replace("\0", "")
        return CaptionTokens(
            literal.tokenize(_ESCAPED_BRACKET.sub(r"\\\\", text) if self._reads_escapes else text), None
        )

    def outputs(self, length: int | None) -> None:
        return None

    def key(self, clip: Any) -> tuple[Any, ...]:
        """The classes too: Z-Image and FLUX.2 klein read one Qwen3 with other layers, LTX and Chroma one T5."""
        encoder = clip.cond_stage_model
        return tuple(f"{type(one).__module__}.{type(one).__qualname__}" for one in (encoder, clip.tokenizer))

    def collect(self, encoded: Mapping[str, Any], length: int | None) -> dict[str, Tensor]:
        """Take all that the encoder gave. Numbers become tensors without axes, as a cached file holds tensors alone.

        Raises ValueError for outputs that a training step can't be given.
        """
        shape = tuple(encoded["cond"].shape)
        if len(shape) != 3 or shape[0] != 1:
            raise ValueError(
                f"The text encoders of {self.family} give a caption in the shape {shape}, which no training takes; it "
                f"must be (1, tokens, width)."
            )
        kept = {name: value for name, value in encoded.items() if value is not None and name != "hooks"}
        for name, value in kept.items():
            if not isinstance(value, Tensor | bool | int | float):
                raise ValueError(
                    f"The text encoders of {self.family} give {name} as a {type(value).__name__}, which can't be "
                    f"stored; encode with CLIP Text Encode and connect Latents to Training Data."
                )
        return {name: value if isinstance(value, Tensor) else torch.tensor(value) for name, value in kept.items()}

    def width(self, clip: Any) -> int:
        """Features of one encoded token, for the estimate of disk space: of all encoders, with each layer that they
        hand on."""
        stage = clip.cond_stage_model
        # LTX-2 brings all layers of its encoder together in one projection.
        if (projection := getattr(stage, "text_embedding_projection", None)) is not None:
            return sum(part.out_features for part in projection.modules() if hasattr(part, "out_features"))
        encoders = [part for part in stage.modules() if isinstance(part, SDClipModel)]
        return sum(_layers(part) * part.transformer.get_input_embeddings().weight.shape[-1] for part in encoders)


def encoder_name(clip: Any) -> str:
    """Name a CLIP by what its tokenizer is for, and its encoders: `ZImage (qwen3_4b)`, `SDXL (clip_g, clip_l)`.

    ComfyUI's class of the encoder may be shared (LTX has Mochi's), and is made on the spot.
    """
    name = type(clip.tokenizer).__name__.strip("_").removesuffix("Tokenizer")
    names = sorted(part.embedding_key for part in _parts(clip.tokenizer))
    return f"{name} ({', '.join(names)})" if names else name


def _layers(encoder: SDClipModel) -> int:
    if encoder.layer == "all":
        return int(encoder.num_layers)
    return len(encoder.layer) if isinstance(encoder.layer, list) else 1


def _literal(tokenizer: Any) -> Any:
    """A copy of a tokenizer, with those in it, that reads brackets and `embedding:` as text."""
    literal = copy.copy(tokenizer)
    for name, part in _tokenizers(tokenizer):
        setattr(literal, name, _literal(part))
    if hasattr(literal, "embedding_identifier"):
        find_no_embeddings(literal)
        literal.disable_weights = True
    return literal


def _tokenizers(tokenizer: Any) -> list[tuple[str, Any]]:
    return [(name, part) for name, part in vars(tokenizer).items() if hasattr(part, "tokenize_with_weights")]


def _parts(tokenizer: Any) -> Iterator[Any]:
    """Each tokenizer for one encoder inside a tokenizer."""
    for _, part in _tokenizers(tokenizer):
        if hasattr(part, "embedding_identifier"):
            yield part
        else:
            yield from _parts(part)

"""Captions for any text encoder in ComfyUI, tokenised by the encoder itself."""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from comfy.sd1_clip import SDClipModel
from torch import Tensor

from ..text import CaptionTokens, TextPolicy, find_no_embeddings

# Core reads `\(` as a literal bracket: a doubled backslash stays a backslash.
_ESCAPED_BRACKET = re.compile(r"\\(?=[()])")


class CoreText(TextPolicy):
    """The text encoders of one CLIP: tokens, lengths and outputs are those of `clip` itself for the caption.

    Captions are literal with any tokenizer. The encoder does not see control images.
    """

    latents = ()
    pictures_only = False
    whole_grids = True

    def __init__(self, clip: Any):
        self.family = encoder_name(clip)
        literal = copy.copy(clip)
        literal.tokenizer = _literal(clip.tokenizer)
        # Most tokenizers read `\(` as `(`; some for a single encoder (LongCat, Lens) never parse brackets.
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
        """Return the class names: Z-Image and FLUX.2 klein use different layers of one Qwen3, LTX and Chroma share a
        T5."""
        encoder = clip.cond_stage_model
        return tuple(f"{type(part).__module__}.{type(part).__qualname__}" for part in (encoder, clip.tokenizer))

    def collect(self, encoded: Mapping[str, Any], length: int | None) -> dict[str, Tensor]:
        """Take all outputs of the encoder. Numbers become tensors without axes, as a cached file holds only tensors.

        Raises ValueError for outputs that a training step can't take.
        """
        shape = tuple(encoded["cond"].shape)
        if len(shape) != 3 or shape[0] != 1:
            raise ValueError(
                f"The text encoders of {self.family} give a caption in the shape {shape}, which no training takes; it "
                f"must be (1, tokens, width)."
            )
        outputs = {name: value for name, value in encoded.items() if value is not None and name != "hooks"}
        for name, value in outputs.items():
            if not isinstance(value, Tensor | bool | int | float):
                raise ValueError(
                    f"The text encoders of {self.family} give {name} as a {type(value).__name__}, which can't be "
                    f"stored; encode with CLIP Text Encode and connect Latents to Training Data."
                )
        return {name: value if isinstance(value, Tensor) else torch.tensor(value) for name, value in outputs.items()}

    def width(self, clip: Any) -> int:
        """Return the features per encoded token, for the estimate of disk space: over all encoders, with each layer
        that they output."""
        stage = clip.cond_stage_model
        # LTX-2 combines all layers of its encoder in one projection.
        if (projection := getattr(stage, "text_embedding_projection", None)) is not None:
            return sum(part.out_features for part in projection.modules() if hasattr(part, "out_features"))
        encoders = [part for part in stage.modules() if isinstance(part, SDClipModel)]
        return sum(_layers(part) * part.transformer.get_input_embeddings().weight.shape[-1] for part in encoders)


def encoder_name(clip: Any) -> str:
    """Name a CLIP by its tokenizer's model and its encoders: `ZImage (qwen3_4b)`, `SDXL (clip_g, clip_l)`.

    ComfyUI's encoder class may be shared (LTX uses Mochi's), and is created ad hoc.
    """
    name = type(clip.tokenizer).__name__.strip("_").removesuffix("Tokenizer")
    names = sorted(part.embedding_key for part in _parts(clip.tokenizer))
    return f"{name} ({', '.join(names)})" if names else name


def _layers(encoder: SDClipModel) -> int:
    if encoder.layer == "all":
        return int(encoder.num_layers)
    return len(encoder.layer) if isinstance(encoder.layer, list) else 1


def _literal(tokenizer: Any) -> Any:
    """Copy a tokenizer, including inner ones, so that it reads brackets and `embedding:` as text."""
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
    """Yield each single-encoder tokenizer inside a tokenizer."""
    for _, part in _tokenizers(tokenizer):
        if hasattr(part, "embedding_identifier"):
            yield part
        else:
            yield from _parts(part)

"""What captions are to each model family, as far as its text encoders tell: the lengths, and the exact tokens."""

import copy
from dataclasses import dataclass
from typing import Any

import comfy.text_encoders.flux

# An identifier that no caption holds (NUL is taken out of captions): core's tokenizer then finds no embeddings.
_NO_IDENTIFIER = "\0embedding:"


@dataclass(frozen=True)
class CaptionTokens:
    """A caption as token and weight pairs, in the form that ComfyUI's `CLIP.encode_from_tokens` takes.

    length: tokens of the padded sequence that the model will see.
    dropped: how many tokens were cut before the end token, because the caption is longer than the longest length.
    """

    tokens: dict[str, list[list[tuple[int, float]]]]
    length: int
    dropped: int = 0


@dataclass(frozen=True)
class TextPolicy:
    """How the captions of one family are tokenised.

    lengths: the token lengths that captions take, ascending; a caption takes the smallest that holds it.
    width: of an encoded token, in numbers.
    """

    family: str
    lengths: tuple[int, ...]
    width: int

    def tokenize(self, clip: Any, caption: str, max_length: int | None = None) -> CaptionTokens:
        """Tokenise a caption literally: brackets and `embedding:` are text, no weights, no files read.

        Equal to ComfyUI's own `clip.tokenize` for a caption with neither. T5 is padded with its pad token to the
        length taken, CLIP-L keeps core's chunks of 77.
        """
        lengths = [length for length in self.lengths if max_length is None or length <= max_length]
        assert lengths, (self.lengths, max_length)
        # Core reads `(red)` as a weight and `\(` as a bracket.
        text = caption.replace("\0", "").replace("(", "\\(").replace(")", "\\)")
        tokenizer = _literal_tokenizer(clip.tokenizer)
        # This replaces T5 options that a node may have set on the CLIP: lengths stay the few of the policy.
        tokens = tokenizer.tokenize_with_weights(text, tokenizer_options={"t5xxl_min_length": 0})
        (bare,) = tokens["t5xxl"]
        length = next((length for length in lengths if length >= len(bare)), lengths[-1])
        dropped = max(0, len(bare) - length)
        padding = [(tokenizer.t5xxl.pad_token, 1.0)] * (length - len(bare))
        tokens["t5xxl"] = [bare[: length - 1] + bare[-1:] if dropped else bare + padding]
        assert len(tokens["t5xxl"][0]) == length
        return CaptionTokens(tokens, length, dropped)


FLUX = TextPolicy("FLUX.1", (256, 512), width=4096)


def text_policy(clip: Any) -> TextPolicy:
    """The policy of the family whose text encoders these are; ValueError if no family that trains uses them."""
    if clip is None:
        raise ValueError(
            "The CLIP input is empty (the checkpoint holds no text encoders); load them with DualCLIPLoader."
        )
    encoder = getattr(clip, "cond_stage_model", clip)
    if isinstance(encoder, comfy.text_encoders.flux.FluxClipModel):
        return FLUX
    raise ValueError(
        f"The CLIP holds {_public_name(type(encoder))} text encoders, which FLUX.1 does not use; load clip_l and "
        f"t5xxl with DualCLIPLoader, type flux."
    )


def _public_name(kind: type) -> str:
    """Core wraps encoders in classes such as `SD3ClipModel_` made on the spot; their module tells the family."""
    return f"{kind.__name__.rstrip('_')} ({kind.__module__.rsplit('.', 1)[-1]})"


def _literal_tokenizer(tokenizer: Any) -> Any:
    """A shallow copy of a FLUX tokenizer whose parts share everything but the search for embeddings."""
    literal = copy.copy(tokenizer)
    for name in ("clip_l", "t5xxl"):
        part = copy.copy(getattr(tokenizer, name))
        part.embedding_identifier = _NO_IDENTIFIER
        part.embedding_directory = None
        setattr(literal, name, part)
    return literal

"""The captions of FLUX.1 and FLUX.2."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import comfy.text_encoders.flux

from ..latents import FLUX, FLUX2
from ..text import (
    CaptionTokens,
    TextPolicy,
    cut_to,
    escape_weights,
    inner_tokenizer,
    literal_tokenizer,
    padded_length,
)

MASKED_LENGTHS = (384, 504, 768, 1024, 1536, 2048, 3072, 4096)
"""The lengths to which FLUX.1's captions of different length are padded with a mask: a ladder without 512."""
FLUX2_TEXT_LENGTH = 512  # black-forest-labs/flux2, src/flux2/text_encoder.py: MAX_LENGTH


def masked_length(length: int) -> int:
    """Round `length` tokens up to one of `MASKED_LENGTHS`; beyond them to a multiple of 1024."""
    return next((step for step in MASKED_LENGTHS if step >= length), -(-length // 1024) * 1024)


class Flux1Text(TextPolicy):
    """T5 padded with its pad token to 256, which the model attends to, and longer as it is; CLIP-L in core's chunks of
    77. With a `max_text_length` T5 is padded to 256 or 512, and cut.

    Captions of up to 256 tokens, and of 512, are batched with those of their own length only, without a mask. Others
    are padded to one of `MASKED_LENGTHS` with a mask: so a graph's length says whether it has one.
    """

    family = "FLUX.1"
    latents = (FLUX,)
    takes_controls = True
    encoder = comfy.text_encoders.flux.FluxClipModel
    files = "clip_l and t5xxl with DualCLIPLoader, type flux"
    lengths = (256, 512)

    def tokenize(self, clip: Any, caption: str, max_length: int | None = None) -> CaptionTokens:
        """Tokenise a caption as ComfyUI does. With `max_length` it gets the smallest of the lengths up to that which
        fits it, and is cut at the longest."""
        tokenizer = literal_tokenizer(clip.tokenizer, ("clip_l", "t5xxl"))
        text = escape_weights(caption)
        if max_length is None:
            tokens = tokenizer.tokenize_with_weights(text, tokenizer_options=clip.tokenizer_options)
            return CaptionTokens(tokens, len(tokens["t5xxl"][0]))
        lengths = [length for length in self.lengths if length <= max_length]
        assert lengths, (self.lengths, max_length)
        # This overrides T5 options that a node may have set on the CLIP: lengths stay those of the policy.
        tokens = tokenizer.tokenize_with_weights(text, tokenizer_options={"t5xxl_min_length": 0})
        (bare,) = tokens["t5xxl"]
        length = next((length for length in lengths if length >= len(bare)), lengths[-1])
        dropped = max(0, len(bare) - length)
        tokens["t5xxl"] = [cut_to(bare, length)]
        return self.lengthened(clip, CaptionTokens(tokens, len(tokens["t5xxl"][0]), dropped), length)

    def model_length(self, length: int) -> int:
        return masked_length(length) if self.masks(length) else length

    def masks(self, length: int) -> bool:
        return length > self.lengths[0] and length != self.lengths[1]

    def shared_length(self, lengths: Sequence[int]) -> int:
        return self.model_length(lengths[0]) if len(set(lengths)) == 1 else masked_length(max(lengths))

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
    """Mistral (dev) or Qwen3 (klein) with the family's template, three of its layers concatenated.

    Core pads Mistral's output with zeros on the left to 512, in the model; Qwen3's tokens are padded on the right.
    """

    family = "FLUX.2"
    latents = (FLUX2,)
    takes_controls = True
    encoder = comfy.text_encoders.flux.Flux2TEModel
    files = "mistral_3_small_flux2 (dev) or qwen_3 (klein) with CLIPLoader, type flux2"
    lengths = (FLUX2_TEXT_LENGTH,)
    layers: ClassVar[int] = 3

    def tokenize(self, clip: Any, caption: str, max_length: int | None = None) -> CaptionTokens:
        """Tokenise a caption whole. With `max_length`, one that has more tokens with its template is cut before the
        template's end."""
        name = clip.tokenizer.clip
        tokenizer = literal_tokenizer(clip.tokenizer, (name,))
        tokens = tokenizer.tokenize_with_weights(escape_weights(caption))
        (pairs,) = tokens[name]
        dropped = 0 if max_length is None else max(0, len(pairs) - max_length)
        if dropped:
            part = inner_tokenizer(tokenizer)
            suffix = tokenizer.llama_template.split("{}")[1]
            tokens[name] = [
                cut_to(pairs, len(pairs) - dropped, len(part.tokenizer(suffix)["input_ids"]) - part.tokens_start)
            ]
        return CaptionTokens(tokens, len(pairs) - dropped, dropped)

    def lengthened(self, clip: Any, caption: CaptionTokens, length: int) -> CaptionTokens:
        return caption  # core pads in the model

    def outputs(self, length: int | None) -> Mapping[str, tuple[int | None, ...]]:
        return {"cond": (1, length, None), "attention_mask": (1, length)}

    def model_length(self, length: int) -> int:
        """Return at least 512: core pads with zeros on the left, and cuts nothing. Longer captions are padded on the
        right, with a mask."""
        return padded_length(length) if self.masks(length) else FLUX2_TEXT_LENGTH

    def masks(self, length: int) -> bool:
        return length > FLUX2_TEXT_LENGTH

    def width(self, clip: Any) -> int:
        return self.layers * super().width(clip)

"""The captions of FLUX.1 and FLUX.2."""

from collections.abc import Mapping
from typing import Any, ClassVar

import comfy.text_encoders.flux

from ..latents import FLUX, FLUX2
from ..text import CaptionTokens, TextPolicy, escape_weights, inner_tokenizer, literal_tokenizer

FLUX2_TEXT_LENGTH = 512  # black-forest-labs/flux2, src/flux2/text_encoder.py: MAX_LENGTH


class Flux1Text(TextPolicy):
    """T5 padded with its pad token to 256 or 512, which the model attends to; CLIP-L in core's chunks of 77."""

    family, latents, takes_controls = "FLUX.1", (FLUX,), True
    encoder = comfy.text_encoders.flux.FluxClipModel
    files = "clip_l and t5xxl with DualCLIPLoader, type flux"
    lengths = (256, 512)

    def tokenize(self, clip: Any, caption: str, max_length: int | None = None) -> CaptionTokens:
        """Tokenise a caption: it gets the smallest of the lengths up to `max_length` that fits it, and is cut at the
        longest."""
        lengths = [length for length in self.lengths if max_length is None or length <= max_length]
        assert lengths, (self.lengths, max_length)
        tokenizer = literal_tokenizer(clip.tokenizer, ("clip_l", "t5xxl"))
        # This overrides T5 options that a node may have set on the CLIP: lengths stay those of the policy.
        tokens = tokenizer.tokenize_with_weights(escape_weights(caption), tokenizer_options={"t5xxl_min_length": 0})
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
    """Mistral (dev) or Qwen3 (klein) with the family's template, three of its layers concatenated.

    Core pads Mistral's output with zeros on the left to 512, in the model; Qwen3's tokens are padded on the right.
    """

    family, latents, takes_controls = "FLUX.2", (FLUX2,), True
    encoder = comfy.text_encoders.flux.Flux2TEModel
    files = "mistral_3_small_flux2 (dev) or qwen_3 (klein) with CLIPLoader, type flux2"
    layers: ClassVar[int] = 3

    def tokenize(self, clip: Any, caption: str, max_length: int | None = None) -> CaptionTokens:
        """Tokenise a caption; if it has more than 512 tokens with its template, it is cut before the template's end."""
        name = clip.tokenizer.clip
        tokenizer = literal_tokenizer(clip.tokenizer, (name,))
        tokens = tokenizer.tokenize_with_weights(escape_weights(caption))
        (pairs,) = tokens[name]
        dropped = max(0, len(pairs) - FLUX2_TEXT_LENGTH)
        if dropped:
            part = inner_tokenizer(tokenizer)
            suffix = tokenizer.llama_template.split("{}")[1]
            suffix_length = len(part.tokenizer(suffix)["input_ids"]) - part.tokens_start
            tokens[name] = [pairs[: FLUX2_TEXT_LENGTH - suffix_length] + pairs[len(pairs) - suffix_length :]]
        return CaptionTokens(tokens, len(pairs) - dropped, dropped)

    def outputs(self, length: int | None) -> Mapping[str, tuple[int | None, ...]]:
        return {"cond": (1, length, None), "attention_mask": (1, length)}

    def model_length(self, length: int) -> int:
        """Return at least 512: core pads with zeros on the left, and cuts nothing."""
        return max(FLUX2_TEXT_LENGTH, length)

    def width(self, clip: Any) -> int:
        return self.layers * super().width(clip)

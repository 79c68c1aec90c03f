"""The captions of Chroma."""

from typing import Any

import comfy.text_encoders.pixart_t5

from ..latents import FLUX
from ..text import CaptionTokens, TextPolicy, escape_weights, literal_tokenizer, padded_length


class ChromaText(TextPolicy):
    """T5 alone, without pads except those requested by T5TokenizerOptions, which the model sees like other tokens."""

    family, latents = "Chroma", (FLUX,)
    encoder = comfy.text_encoders.pixart_t5.PixArtT5XXL
    files = "t5xxl with CLIPLoader, type chroma"

    def tokenize(self, clip: Any, caption: str, max_length: int | None = None) -> CaptionTokens:
        tokenizer = literal_tokenizer(clip.tokenizer, (clip.tokenizer.clip,))
        options = clip.tokenizer_options
        tokens = tokenizer.tokenize_with_weights(escape_weights(caption), tokenizer_options=options)
        ((pairs,),) = tokens.values()
        return CaptionTokens(tokens, len(pairs))

    def model_length(self, length: int) -> int:
        return padded_length(length)

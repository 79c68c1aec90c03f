"""The captions of Wan."""

from typing import Any

import comfy.text_encoders.wan

from ..latents import WAN21, WAN22
from ..text import CaptionTokens, TextPolicy, escape_weights, literal_tokenizer

TEXT_LENGTH = 512  # Wan-Video/Wan2.1, wan/configs/shared_config.py: text_len


class WanText(TextPolicy):
    """umT5 over exactly 512 tokens, padded with zeros; the model attends to all."""

    family, latents, pictures_only = "Wan", (WAN21, WAN22), False
    encoder = comfy.text_encoders.wan.WanT5Model
    files = "umt5_xxl with CLIPLoader, type wan"

    def tokenize(self, clip: Any, caption: str, max_length: int | None = None) -> CaptionTokens:
        name = clip.tokenizer.clip
        tokenizer = literal_tokenizer(clip.tokenizer, (name,))
        tokens = tokenizer.tokenize_with_weights(escape_weights(caption))
        ((key, (pairs,)),) = tokens.items()
        dropped = max(0, len(pairs) - TEXT_LENGTH)
        tokens[key] = [pairs[: TEXT_LENGTH - 1] + pairs[-1:] if dropped else pairs]
        assert len(tokens[key][0]) == TEXT_LENGTH
        return CaptionTokens(tokens, TEXT_LENGTH, dropped)

    def model_length(self, length: int) -> int:
        """Return 512: shorter captions are padded with zeros, which the model attends to; longer ones are cut."""
        return TEXT_LENGTH

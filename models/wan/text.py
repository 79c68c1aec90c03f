"""The captions of Wan."""

from typing import Any

import comfy.text_encoders.wan

from ..latents import WAN21, WAN22
from ..text import CaptionTokens, TextPolicy, cut_to, escape_weights, literal_tokenizer, padded_length

TEXT_LENGTH = 512  # Wan-Video/Wan2.1, wan/configs/shared_config.py: text_len


class WanText(TextPolicy):
    """umT5 over 512 tokens, padded with zeros, which the model attends to; a longer caption is as it is."""

    family = "Wan"
    latents = (WAN21, WAN22)
    pictures_only = False
    encoder = comfy.text_encoders.wan.WanT5Model
    files = "umt5_xxl with CLIPLoader, type wan"
    lengths = (TEXT_LENGTH,)

    def tokenize(self, clip: Any, caption: str, max_length: int | None = None) -> CaptionTokens:
        name = clip.tokenizer.clip
        tokenizer = literal_tokenizer(clip.tokenizer, (name,))
        tokens = tokenizer.tokenize_with_weights(escape_weights(caption))
        ((key, (pairs,)),) = tokens.items()
        dropped = 0 if max_length is None else max(0, len(pairs) - max_length)
        tokens[key] = [cut_to(pairs, len(pairs) - dropped)]
        assert len(tokens[key][0]) >= TEXT_LENGTH
        return CaptionTokens(tokens, len(pairs) - dropped, dropped)

    def lengthened(self, clip: Any, caption: CaptionTokens, length: int) -> CaptionTokens:
        return caption  # none is shorter than the length

    def model_length(self, length: int) -> int:
        """Return at least 512: shorter captions are padded with zeros, which the model attends to. Longer ones are
        padded with a mask."""
        return padded_length(length) if self.masks(length) else TEXT_LENGTH

    def masks(self, length: int) -> bool:
        return length > TEXT_LENGTH

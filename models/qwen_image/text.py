"""The captions of Qwen-Image, alone or with the control images of its Edit models."""

from collections.abc import Sequence
from math import sqrt
from typing import Any, ClassVar

import comfy.text_encoders.qwen_image
import comfy.utils
from torch import Tensor

from ..latents import WAN21
from ..text import (
    EDIT_PROMPTS,
    FIRST_EDIT,
    PLUS,
    CaptionTokens,
    TextPolicy,
    Tokens,
    escape_weights,
    inner_tokenizer,
    literal_tokenizer,
    padded_length,
)

# The pixel area at which the text encoder sees control images, and that of one token, as in core's nodes.
SEEN_AREA = {PLUS: 384 * 384, FIRST_EDIT: 1024 * 1024}
SEEN_TOKEN = 28 * 28


class QwenImageText(TextPolicy):
    """Qwen2.5-VL with the family's template, unpadded; it sees control pictures too."""

    family = "Qwen-Image"
    latents = (WAN21,)
    takes_controls = True
    encoder = comfy.text_encoders.qwen_image.QwenImageTEModel
    edit_prompts = EDIT_PROMPTS
    files = "qwen_2.5_vl_7b with CLIPLoader, type qwen_image"
    _picture: ClassVar[str] = "<|vision_start|><|image_pad|><|vision_end|>"

    def tokenize(self, clip: Any, caption: str, max_length: int | None = None) -> CaptionTokens:
        return CaptionTokens(self._tokens(clip, clip.tokenizer.llama_template, caption, ()), None)

    def tokenize_edit(
        self, clip: Any, caption: str, count: int, style: str, pictures: Sequence[Tensor] = ()
    ) -> CaptionTokens:
        """Tokenise like core's TextEncodeQwenImageEditPlus (PLUS) or TextEncodeQwenImageEdit (FIRST_EDIT).

        pictures: (1, H, W, 3) each, as returned by `resize_control`; without them their placeholder tokens stay.
        """
        template = clip.tokenizer.llama_template_images
        assert count and template.count(self._picture) == 1, (count, template)
        if style == PLUS:
            template = template.replace(self._picture, "")
            numbered = "".join(f"Picture {index + 1}: {self._picture}" for index in range(count))
        else:
            assert count == 1, count
            numbered = ""
        return CaptionTokens(self._tokens(clip, template, caption, pictures, numbered), None)

    def resize_control(self, picture: Tensor, style: str) -> Tensor:
        height, width = picture.shape[1:3]
        scale = sqrt(SEEN_AREA[style] / (width * height))
        upright = picture.movedim(-1, 1)
        scaled = comfy.utils.common_upscale(upright, round(width * scale), round(height * scale), "area", "disabled")
        return scaled.movedim(1, -1)

    def control_tokens(self, style: str) -> int:
        return SEEN_AREA[style] // SEEN_TOKEN

    def _tokens(self, clip: Any, template: str, caption: str, pictures: Sequence[Tensor], prefix: str = "") -> Tokens:
        name = clip.tokenizer.clip
        # The template is filled here: core omits it for a caption that begins like a template.
        text = template.format(prefix + escape_weights(caption))
        return literal_tokenizer(clip.tokenizer, (name,)).tokenize_with_weights(text, images=list(pictures))

    def stop_text(self, clip: Any, caption: str) -> str | None:
        """Return the pad token if the caption contains it: core masks everything from its first occurrence on."""
        part = inner_tokenizer(clip.tokenizer)
        ((pairs,),) = self.tokenize(clip, caption).tokens.values()
        return part.inv_vocab[part.pad_token] if any(pair[0] == part.pad_token for pair in pairs) else None

    def model_length(self, length: int) -> int:
        return padded_length(length)

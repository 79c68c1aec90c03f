"""Captions by a vision-language model that ComfyUI loads as CLIP, such as Qwen3-VL, Qwen3.5 or Gemma 3."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...common.core import can_generate_text, end_of_node, quiet_progress
from ...common.fingerprint import fingerprint, weights_fingerprint
from ...common.progress import Interrupted
from .instruction import CaptionStyle

PIXELS = 1024 * 1024  # of the picture that the model sees
RETRIES = 2  # of an answer with a word that it may not hold
_RETRY_TEMPERATURE = 0.7
# A chat of Qwen's models without a system text: those of image models ask for edits.
_CHAT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"
_PICTURE_TOKEN = "<|image_pad|>"


@dataclass(frozen=True)
class VisionLanguageModel:
    """A CLIP that sees pictures and writes text.

    clip: the CLIP.
    style: what captions should be like.
    temperature: 0 takes the likeliest words, more varies them.
    seed: of the words that are drawn.
    interrupted: called for each word; raises to stop.
    """

    clip: Any
    style: CaptionStyle
    temperature: float
    seed: int
    interrupted: Interrupted

    def key(self) -> str:
        """Fingerprint the model and all settings that an answer depends on."""
        draws = self.temperature > 0 or bool(self.style.never)
        sampling = (self.temperature, self.seed if draws else 0, self.style.max_tokens(), PIXELS)
        rules = (self.style.style, self.style.max_words, self.style.never_use, self.style.trigger)
        return fingerprint(
            "vision language 1", weights_fingerprint(self.clip.patcher), self.style.prompt(), sampling, rules
        )

    def caption(self, image: Tensor) -> str:
        """Write the caption of a picture (1, H, W, 3) in 0 to 1; empty if the model answers nothing.

        An answer with a forbidden word is asked for again with other words; from the last one the word is taken out.
        Raises ValueError if the CLIP sees no pictures or writes no text.
        """
        text, whole = self._answer(image, self.temperature, self.seed)
        for attempt in range(1, RETRIES + 1):
            if not self.style.breaks(text):
                break
            text, whole = self._answer(image, max(self.temperature, _RETRY_TEMPERATURE), (self.seed + attempt) % 2**64)
        return self.style.finish(text, whole)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) at which the model sees a picture: PIXELS at most."""
        scale = min(1.0, (PIXELS / (height * width)) ** 0.5)
        return max(1, round(height * scale)), max(1, round(width * scale))

    def _answer(self, image: Tensor, temperature: float, seed: int) -> tuple[str, bool]:
        """Have the model answer once; returns the text, and whether it came to an end."""
        most = self.style.max_tokens()
        with quiet_progress(self.interrupted):
            tokens = self.clip.generate(
                self._tokens(image),
                do_sample=temperature > 0,
                max_length=most,
                temperature=temperature if temperature > 0 else 1.0,
                top_k=64,
                top_p=0.95,
                min_p=0.05,
                repetition_penalty=1.05,
                seed=seed,
            )
        end_of_node()
        return self.clip.decode(tokens), len(tokens) < most

    def _tokens(self, image: Tensor) -> Mapping[str, Any]:
        # Tokenizers differ in the names by which they take a picture; each ignores those of others.
        options: dict[str, Any] = {"image": image, "images": [image], "skip_template": False, "min_length": 1}
        template = getattr(self.clip.tokenizer, "llama_template_images", "")
        if _PICTURE_TOKEN in template:
            options["llama_template"] = _CHAT
        tokens: Mapping[str, Any] = self.clip.tokenize(self.style.prompt(), thinking=False, **options)
        if not can_generate_text(self.clip) or not any(map(_is_picture, _flat(tokens))):
            raise ValueError(
                "clip can't write about pictures: it needs a vision-language model; load Qwen3-VL, Qwen3.5, Gemma 3 or "
                "Gemma 4 with Load CLIP."
            )
        return tokens


def _flat(tokens: Mapping[str, Any]) -> list[Any]:
    rows = [row for value in tokens.values() if isinstance(value, list) for row in value if isinstance(row, list)]
    return [entry[0] for row in rows for entry in row if isinstance(entry, tuple)]


def _is_picture(token: Any) -> bool:
    return isinstance(token, dict) and token.get("type") == "image"

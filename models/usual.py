"""Usual settings of a model: its part of a preset of Train LoRA, and of a measured step of sampling."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class UsualSettings:
    """One model's usual settings.

    learning_rate: of a LoRA, with AdamW.
    file_names: pattern of the names of its files in lower case, by which the browser knows it before it is loaded, as
        Python's `re` and JavaScript read it; empty if its names tell nothing.
    pictures_only: whether it makes no clips.
    prompt_tokens: tokens of a short prompt, as ComfyUI's text encoder gives them: most pad it.
    negative_tokens: tokens of a negative prompt; None for as many. ComfyUI runs prompts of one length in one call,
        others in two.
    cfg: guidance scale of the sampler.
    """

    learning_rate: float = 1e-4
    file_names: str = ""
    pictures_only: bool = False
    prompt_tokens: int = 256
    negative_tokens: int | None = None
    cfg: float = 4.0


UNET = UsualSettings(prompt_tokens=77, cfg=7.0)  # CLIP's length

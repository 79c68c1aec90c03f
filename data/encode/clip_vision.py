"""CLIP vision output of an image, as ComfyUI's conditioning holds it."""

from typing import Any

import comfy.clip_vision
from torch import Tensor

HIDDEN_STATES = "penultimate_hidden_states"
"""The part of it that Wan 2.1 takes: (1, tokens, width)."""

CLIP_H_WIDTH = 1280
"""What Wan 2.1 takes, CLIP ViT-H's (Wan-Video/Wan2.1, wan/modules/model.py: MLPProj(1280, dim))."""


def check_vision(clip_vision: Any) -> None:
    """ValueError for a CLIP vision model, as ComfyUI loads it, that is known to be of another width."""
    width = getattr(clip_vision, "config", {}).get("hidden_size")
    if width not in (None, CLIP_H_WIDTH):
        raise ValueError(
            f"clip_vision is a CLIP vision model of width {width} and Wan 2.1 takes one of {CLIP_H_WIDTH}; load "
            f"clip_vision_h.safetensors with Load CLIP Vision."
        )


def vision_output(seen: Tensor) -> comfy.clip_vision.Output:
    output = comfy.clip_vision.Output()
    output[HIDDEN_STATES] = seen
    return output


def hidden_states(output: Any) -> Tensor:
    """Take the hidden states out of the output of any node."""
    return getattr(output, HIDDEN_STATES)

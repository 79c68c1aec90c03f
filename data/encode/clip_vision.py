"""CLIP vision output of an image, as ComfyUI's conditioning holds it."""

from typing import Any

import comfy.clip_vision
from torch import Tensor

HIDDEN_STATES = "penultimate_hidden_states"
"""Attribute of the output that Wan 2.1 uses: (1, tokens, width)."""

CLIP_H_WIDTH = 1280
"""Width of CLIP ViT-H, the input of Wan 2.1 (Wan-Video/Wan2.1, wan/modules/model.py: MLPProj(1280, dim))."""


def check_vision(clip_vision: Any) -> None:
    """Check that a CLIP vision model has the width that Wan 2.1 takes.

    Raises ValueError for another width; a model whose width is unknown passes.
    """
    width = getattr(clip_vision, "config", {}).get("hidden_size")
    if width not in (None, CLIP_H_WIDTH):
        raise ValueError(
            f"clip_vision is a CLIP vision model of width {width} and Wan 2.1 takes one of {CLIP_H_WIDTH}; load "
            f"clip_vision_h.safetensors with Load CLIP Vision."
        )


def vision_output(states: Tensor) -> comfy.clip_vision.Output:
    """Build core's CLIP vision output from hidden states (1, tokens, width)."""
    output = comfy.clip_vision.Output()
    output[HIDDEN_STATES] = states
    return output


def hidden_states(output: Any) -> Tensor:
    """Return the hidden states, (1, tokens, width), of a CLIP vision output."""
    return getattr(output, HIDDEN_STATES)

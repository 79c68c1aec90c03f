"""What CLIP vision saw of a picture, as ComfyUI's conditioning holds it."""

from typing import Any

import comfy.clip_vision
from torch import Tensor

SEEN = "penultimate_hidden_states"
"""The part of it that Wan 2.1 takes: (1, tokens, width)."""


def vision_output(seen: Tensor) -> comfy.clip_vision.Output:
    output = comfy.clip_vision.Output()
    output[SEEN] = seen
    return output


def seen_by(output: Any) -> Tensor:
    """The inverse, of an output of any node."""
    return output[SEEN]

"""Captions encoded with the CLIP of the graph."""

from typing import Any

import torch
from torch import Tensor

from ..models.text import CaptionTokens


@torch.inference_mode()
def encode_caption(clip: Any, caption: CaptionTokens) -> dict[str, Tensor]:
    """Encode one caption with a ComfyUI CLIP: {"cond": (1, L, D), "pooled_output": (1, P)}, on core's device.

    Equal to `clip.encode_from_tokens_scheduled(clip.tokenize(text))` bit for bit where the tokens are. Hooks on the
    CLIP are not honoured: they follow a sampling schedule, which training does not have.
    """
    encoded = clip.encode_from_tokens(caption.tokens, return_dict=True)
    cond, pooled = encoded["cond"], encoded["pooled_output"]
    assert cond.shape[:2] == (1, caption.length), (cond.shape, caption.length)
    return {"cond": cond, "pooled_output": pooled}

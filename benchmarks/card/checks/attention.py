"""Choose the attention kernel so that the choice lasts until the next one.

Three things change torch's flags:

- `comfy.model_management` turns the plain, flash and efficient kernels on when it is imported;
- on CUDA, `comfy.ops.scaled_dot_product_attention` turns all four on around each call, in its own order;
- at a process's first attention on a Hopper GPU torch puts cuDNN's kernel first. If ComfyUI makes that call, its order
  is lost during the call: that call runs on cuDNN, and all later ones on flash.

So both are imported first, ComfyUI's order is changed in the list that it reads, and torch is asked once beforehand.
"""

from importlib import import_module

import torch
from torch.nn.attention import SDPBackend

FLAGS = ("flash", "mem_efficient", "cudnn")
_order: list[SDPBackend] = []  # ComfyUI's own


def choose_attention(plain: bool) -> None:
    """Let attention run on torch's plain kernel, which is deterministic, or on whichever is chosen elsewhere."""
    from tessera.models.layers.attention import settle_kernel_order

    ops = import_module("comfy.ops")  # and with it comfy.model_management
    settle_kernel_order()
    for name in FLAGS:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(not plain)
    torch.backends.cuda.enable_math_sdp(True)
    order = getattr(ops, "SDPA_BACKEND_PRIORITY", None)
    if order is not None:
        _order[:] = _order or order
        order[:] = [SDPBackend.MATH] if plain else _order

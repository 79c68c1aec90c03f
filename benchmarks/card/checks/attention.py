"""The kernel of attention, chosen so that it holds until the next choice.

Three things change what torch's flags say:

- `comfy.model_management` turns the plain, flash and efficient kernels on when it is imported;
- on CUDA, `comfy.ops.scaled_dot_product_attention` turns all four on around each call, in an order of its own;
- at a process's first attention on a GPU of Hopper's kind torch puts cuDNN's kernel first. If ComfyUI makes that call,
  its order is undone in the middle of it: that call runs on cuDNN, and all later ones on flash.

So they are imported first, ComfyUI's own order is changed where it reads it, and torch is asked once beforehand.
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

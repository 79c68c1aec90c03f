"""Sum of a Linear's result and the product of two thin matrices, without a copy of that result.

torch.addmm(y, a, b) copies y before it adds a·b, on CUDA up to torch 2.13 (pytorch/pytorch#191706). On an H100 that
took 14 ms of a step of FLUX.1. There the sum is made in place: eagerly here, in compiled graphs by `graph_pass`.
"""

import torch
from torch import Tensor

from ...common.torch_version import copies_addend

COPIES_ADDEND = copies_addend(torch.__version__)


def as_rows(x: Tensor) -> Tensor:
    """Reshape x (…, n) to a matrix (rows, n). If several matmuls read this one matrix, a compiler accumulates its
    gradient inside the matmuls; with a separate view for each, it takes extra passes over memory."""
    return x.reshape(-1, x.shape[-1])


def add_product(y: Tensor, activations: Tensor, up: Tensor) -> Tensor:
    """Compute y + activations · upᵀ, (…, out), as one addmm: the matmul's result alone is never in memory.

    y: a Linear's result, which nobody else reads; it may be overwritten. activations: (…, rank) with the rows of y.
    up: (out, rank).
    """
    if COPIES_ADDEND and y.dim() == 2 and not torch.compiler.is_compiling() and not _is_followed():
        return y.addmm_(as_rows(activations), up.t())
    return torch.addmm(as_rows(y), as_rows(activations), up.t()).view(y.shape)


def _is_followed() -> bool:
    """Return True while a mode sees every op: it may hold y, as selective checkpointing does."""
    return torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack() > 0

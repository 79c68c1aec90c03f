"""RMS norm as torch 2.14 runs it on a GPU, one op each way, so that it can be counted without a GPU.

On the CPU and the meta device torch decomposes the norm, and an eager block saves fp32 copies.
"""

from collections.abc import Callable
from typing import Any

import torch


def norm_of(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """torch's rms_norm over ops with the arguments of `_fused_rms_norm` and of its backward. The input is kept as it
    is, with a number for each row."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, shape: Any, weight: torch.Tensor | None, eps: float | None) -> Any:
            out, rstd = forward(x, list(shape), weight, eps)
            ctx.save_for_backward(x, weight, rstd)
            ctx.shape = list(shape)
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, weight, rstd = ctx.saved_tensors
            return backward(grad, x, ctx.shape, rstd, weight, [True, False])[0], None, None, None

    return lambda x, shape, weight=None, eps=None: Norm.apply(x, shape, weight, eps)


@torch.library.custom_op("counted::fused_rms_norm", mutates_args=())
def _fused_norm(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("it is counted, not run")


@_fused_norm.register_fake
def _(x, shape, weight, eps):
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("counted::fused_rms_norm_backward", mutates_args=())
def _fused_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: list[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
) -> torch.Tensor:
    raise AssertionError("it is counted, not run")


@_fused_norm_backward.register_fake
def _(grad, x, shape, rstd, weight):
    return torch.empty_like(x)


# Their kernels read whole rows of whole tensors: a part of a wider one is copied first.
eager_norm = norm_of(
    lambda x, *rest: _fused_norm(x.contiguous(), *rest),
    lambda grad, x, shape, rstd, weight, _: (
        _fused_norm_backward(grad.contiguous(), x.contiguous(), shape, rstd, weight),
    ),
)

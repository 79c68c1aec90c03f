"""Gradients of the two factors of a thin product, hidden·upᵀ.

As two products each reads the whole gradient of the result. On a GPU they are one op, which reads it once by a Triton
kernel; without Triton, and elsewhere, they are the two products.
"""

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from .ops import register

_LOG = logging.getLogger(__name__)
DEVICES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16)
# Rows from which on the kernel's tiles are filled, and the largest rank of which its sums fit the registers.
LEAST_ROWS, MOST_RANK = 64, 64
ThinGrads = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def thin_grads(grad: Tensor, hidden: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """grad (rows, out), hidden (rows, rank), up (out, rank) → the gradients of hidden and of up."""
    fits = grad.dtype in DTYPES and len(hidden) >= LEAST_ROWS and hidden.shape[1] <= MOST_RANK
    if grad.device.type in DEVICES and fits:
        hidden_grad, up_grad = thin_grads_op(grad, hidden, up)
        return hidden_grad, up_grad
    return _two_products(grad, hidden, up)


def _two_products(grad: Tensor, hidden: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return grad @ up, grad.t() @ hidden


def thin_product_grads(grad: Tensor, hidden: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """`thin_grads` in one pass over grad, where Triton runs."""
    kernel = _triton_kernel(grad.device, grad.dtype, hidden.shape[1])
    if kernel is None:
        return _two_products(grad, hidden, up)
    grad, hidden = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (grad, hidden))
    return kernel(grad, hidden, up)


thin_grads_op = register(
    thin_product_grads,
    lambda grad, hidden, up: (hidden.new_empty(hidden.shape), up.new_empty(up.shape)),
    lambda grad, hidden, up, **_: 4 * grad.numel() * hidden.shape[1],
)


@functools.cache
def _triton_kernel(device: torch.device, dtype: torch.dtype, rank: int) -> ThinGrads | None:
    """Return the Triton kernel if there is Triton and it gives the right values here."""
    try:
        from .gradients_kernel import thin_grads as kernel

        # Small whole numbers, whose sums are exact in any order.
        grad, hidden, up = (
            (torch.arange(a * b, device=device) % (3 + i) - 1).to(dtype).view(a, b)
            for i, (a, b) in enumerate(((70, 300), (70, rank), (300, rank)))
        )
        found, wanted = kernel(grad, hidden, up), _two_products(grad.double(), hidden.double(), up.double())
        if all(torch.equal(one, other.to(dtype)) for one, other in zip(found, wanted, strict=True)):
            return kernel
        _LOG.warning("Triton multiplies a LoRA's gradients wrong on this GPU; torch does it in two products.")
    except ImportError:
        pass
    except Exception as error:  # no C compiler, a GPU that this Triton does not know: anything
        _LOG.info("Triton does not run here (%s); torch makes a LoRA's gradients in two products.", error)
    return None

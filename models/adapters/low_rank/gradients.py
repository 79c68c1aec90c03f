"""Gradients of the two factors of a thin product, hidden·upᵀ."""

from torch import Tensor


def thin_grads(grad: Tensor, hidden: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """grad (rows, out), hidden (rows, rank), up (out, rank) → the gradients of hidden and of up."""
    return grad @ up, grad.t() @ hidden

"""A LoRA at a strength of -1, in training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from .network import LoraNetwork


@contextmanager
def negated(network: LoraNetwork) -> Iterator[None]:
    """Run with the negated update within the context, forward and backward, as at a strength of -1.

    One factor of each adapter (`Adapter.odd_in`) is negated in place, so that compiled graphs see no difference, and
    with it the gradients that it has so far: so a backward within adds the gradient of the factor itself.
    """
    factors = [adapter.get_parameter(adapter.odd_in) for adapter in network.adapters.values()]
    _negate(factors)
    try:
        yield
    finally:
        _negate(factors)


@torch.no_grad()
def _negate(factors: Sequence[nn.Parameter]) -> None:
    torch._foreach_neg_([factor.detach() for factor in factors])
    gradients = [factor.grad for factor in factors if factor.grad is not None]
    if gradients:
        torch._foreach_neg_(gradients)

"""Comparison of a saved optimizer state with the state that the optimizer creates in its first step.

Only an optimizer's class knows the entries of its state. A missing entry or one of the wrong shape would make the first
step of a resumed run fail with a torch error, so the entries are compared before a model is loaded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...common.rng import generator
from ..optim.optimizers import build_optimizer, chosen_class, state_of
from ..optim.options import OptimizerOptions
from ..optim.registry import CUSTOM, arguments
from .schema import StoredTensor

# Step counters, which optimizers use as exponents and divisors.
_COUNTERS = ("step", "k")
_MOST = 1e18  # optimizers square their estimates, in fp32


def fits_optimizer(
    options: OptimizerOptions,
    weights: Sequence[nn.Parameter],
    saved: Mapping[str, Any],
    step: int,
    device: torch.device,
) -> bool:
    """Test that a saved state has the entries that the chosen optimizer creates in its first step.

    weights: the trained weights in the optimizer's order; only their shapes are read.
    saved: optimizer state of a `StateHeader`.
    step: optimizer steps of the state.
    device: device on which the optimizer will run.

    Additional entries are allowed, because an optimizer may add some later. A custom class is not checked: it may
    create other entries at each step.
    """
    if options.optimizer == CUSTOM:
        return True
    numbers: dict[tuple[int, ...], int] = {}
    for weight in weights:
        numbers.setdefault(tuple(weight.shape), len(numbers))
    first = _first_state(options, list(numbers), device)
    entries = saved["state"]
    for number, weight in enumerate(weights):
        saved_entry, first_entry = entries.get(number, {}), first["state"].get(numbers[tuple(weight.shape)], {})
        # A weight that never had a gradient has no entries.
        if saved_entry != {} and not _fits(saved_entry, first_entry, step):
            return False
    if not set(entries) <= set(range(len(weights))):
        return False
    made_with = {"params", "initial_lr", *arguments(chosen_class(options))}
    learnt = {name: value for name, value in first["param_groups"][0].items() if name not in made_with}
    # An older library saved fewer entries; `restore_optimizer` keeps the current values of the missing ones.
    groups = [
        (group, {name: value for name, value in learnt.items() if name in group}) for group in saved["param_groups"]
    ]
    return all(_fits(group, expected, step) for group, expected in groups)


def _first_state(options: OptimizerOptions, shapes: Sequence[tuple[int, ...]], device: torch.device) -> dict[str, Any]:
    weights = [_weight(shape, device) for shape in shapes]
    optimizer = build_optimizer(options, weights)
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.5)
    optimizer.step()
    return state_of(optimizer)


def _weight(shape: tuple[int, ...], device: torch.device) -> nn.Parameter:
    return nn.Parameter(0.1 * torch.randn(shape, generator=generator(0, "first state")).to(device))


def _fits(saved: Any, first: Any, step: int, name: str = "") -> bool:
    """Compare one entry: a tensor must have the same shape, a number must be finite and in range."""
    if isinstance(first, Mapping):
        return isinstance(saved, Mapping) and all(
            key in saved and _fits(saved[key], value, step, str(key)) for key, value in first.items()
        )
    if isinstance(first, bool | str):
        return isinstance(saved, type(first))
    if isinstance(first, Tensor):
        if not isinstance(saved, StoredTensor):
            return False
        if saved.shape == tuple(first.shape) and saved.value is None:
            return True
        # Prodigy stores the initial value of a weight that began at zero as a single zero.
        return (first.numel() == 1 or name == "p0") and _is_in_range(saved.value, step, name)
    if isinstance(first, int | float):
        return _is_in_range(saved, step, name)
    return not isinstance(saved, Mapping | str)


def _is_in_range(number: Any, step: int, name: str) -> bool:
    if type(number) not in (int, float) or not abs(number) <= _MOST:
        return False
    return name not in _COUNTERS or 0 <= number <= step

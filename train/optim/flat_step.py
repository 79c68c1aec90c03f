"""Steps of an elementwise optimizer on one flat tensor per parameter group."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...lora.flat_group import FlatGroup
from .optimizers import state_of


class FlatStep:
    """Lets an optimizer step the flat `master` of each group instead of its weights.

    The optimizer object stays the same, and so do its scheduler and gradient scaler: only its parameters and its state
    are replaced. States are saved per weight; `state` slices them out of the joined state.

    joined: False if each weight is stepped by itself: an optimizer skips a weight that has no gradient, neither decays
        it nor counts its step, so that a group with such weights cannot be stepped as one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[FlatGroup]):
        self.optimizer = optimizer
        self.groups = list(groups)
        self.joined = False
        self.join()

    def join(self) -> None:
        """Step each group as one tensor, unless its weights have states that cannot be joined."""
        if not all(self._can_join(group) for group in self.groups):
            return
        for param_group, group in zip(self.optimizer.param_groups, self.groups, strict=True):
            param_group["params"] = [group.master]
            if state := self._joined_state(group):
                self.optimizer.state[group.master] = state
        self.joined = True

    def split(self) -> None:
        """Step each weight by itself."""
        if not self.joined:
            return
        for param_group, group in zip(self.optimizer.param_groups, self.groups, strict=True):
            param_group["params"] = list(group.weights)
            joined = self.optimizer.state.pop(group.master, {})
            for i, weight in enumerate(group.weights if joined else ()):
                self.optimizer.state[weight] = {name: _weight_part(group, i, value) for name, value in joined.items()}
        self.joined = False

    def prepare(self) -> None:
        """Give the optimizer the gathered gradients; called before they are unscaled."""
        if not all(group.is_complete for group in self.groups):
            self.split()
        for group in self.groups:
            group.master.grad = group.gradient if self.joined else None

    def state(self) -> dict[str, Any]:
        """Return the optimizer's state of each weight, with the name of its class."""
        if not self.joined:
            return state_of(self.optimizer)
        joined = dict(self.optimizer.state)
        self.split()
        state_dict = state_of(self.optimizer)
        self.optimizer.state.clear()
        self.optimizer.state.update(joined)
        for param_group, group in zip(self.optimizer.param_groups, self.groups, strict=True):
            param_group["params"] = [group.master]
        self.joined = True
        return state_dict

    def _can_join(self, group: FlatGroup) -> bool:
        """Return whether the states of a group's weights differ only in the entries that have the weight's shape."""
        states = [self.optimizer.state.get(weight, {}) for weight in group.weights]
        if any(state.keys() != states[0].keys() for state in states):
            return False
        shared_names = [name for name, value in states[0].items() if not _is_shaped(value, group.weights[0])]
        return all(_is_equal(states[0][name], state[name]) for name in shared_names for state in states)

    def _joined_state(self, group: FlatGroup) -> dict[str, Any]:
        """Join the states of a group's weights, and free each entry once it is joined."""
        states = [self.optimizer.state.pop(weight, {}) for weight in group.weights]
        joined: dict[str, Any] = {}
        for name in list(states[0]):
            values = [state.pop(name) for state in states]
            if _is_shaped(values[0], group.weights[0]):
                joined[name] = group.joined(values)
            else:
                joined[name] = values[0].clone() if isinstance(values[0], Tensor) else values[0]
        return joined


def _is_shaped(value: Any, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == weight.shape


def _weight_part(group: FlatGroup, number: int, value: Any) -> Any:
    """Return the part of one weight in an entry of a joined state."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == group.master.shape:
        return group.part(value, number)
    return value.clone()  # a counter, of which each weight needs its own copy


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and bool(torch.equal(a, b))
    return bool(a == b)

"""Steps of an elementwise optimizer on one tensor for each parameter group."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...lora.flat_group import FlatGroup
from .optimizers import state_of


class FlatStep:
    """Let an optimizer step the `master` of each group in place of its weights.

    The optimizer's object stays the same, and so do its scheduler and its gradient scaler: its parameters and its state
    are exchanged. What is saved is the state of each weight, which `state` cuts out of the joined one.

    joined: false where each weight is stepped by itself: an optimizer leaves out a weight that has no gradient, neither
        decays it nor counts its step, so that a group with such weights cannot be stepped as one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[FlatGroup]):
        self.optimizer, self.groups, self.joined = optimizer, list(groups), False
        self.join()

    def join(self) -> None:
        """Step each group as one, unless its weights have states that cannot be joined."""
        if not all(self._can_join(group) for group in self.groups):
            return
        for own, group in zip(self.optimizer.param_groups, self.groups, strict=True):
            own["params"] = [group.master]
            if state := self._joined_state(group):
                self.optimizer.state[group.master] = state
        self.joined = True

    def split(self) -> None:
        """Step each weight by itself."""
        if not self.joined:
            return
        for own, group in zip(self.optimizer.param_groups, self.groups, strict=True):
            own["params"] = list(group.weights)
            joined = self.optimizer.state.pop(group.master, {})
            for i, weight in enumerate(group.weights if joined else ()):
                self.optimizer.state[weight] = {name: _of_one(group, i, value) for name, value in joined.items()}
        self.joined = False

    def prepare(self) -> None:
        """Hand the optimizer the gradients that were gathered; called before they are unscaled."""
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
        found = state_of(self.optimizer)
        self.optimizer.state.clear()
        self.optimizer.state.update(joined)
        for own, group in zip(self.optimizer.param_groups, self.groups, strict=True):
            own["params"] = [group.master]
        self.joined = True
        return found

    def _can_join(self, group: FlatGroup) -> bool:
        """Return True where the states of a group's weights differ in what lies in their shape alone."""
        states = [self.optimizer.state.get(weight, {}) for weight in group.weights]
        if any(state.keys() != states[0].keys() for state in states):
            return False
        shared = [name for name, value in states[0].items() if not _is_shaped(value, group.weights[0])]
        return all(_same(states[0][name], state[name]) for name in shared for state in states)

    def _joined_state(self, group: FlatGroup) -> dict[str, Any]:
        """Join the states of a group's weights, and drop each entry of them as it is joined."""
        states = [self.optimizer.state.pop(weight, {}) for weight in group.weights]
        found: dict[str, Any] = {}
        for name in list(states[0]):
            values = [state.pop(name) for state in states]
            if _is_shaped(values[0], group.weights[0]):
                found[name] = group.joined(values)
            else:
                found[name] = values[0].clone() if isinstance(values[0], Tensor) else values[0]
        return found


def _is_shaped(value: Any, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == weight.shape


def _of_one(group: FlatGroup, number: int, value: Any) -> Any:
    """The part of one weight in an entry of a joined state."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == group.master.shape:
        return group.part(value, number)
    return value.clone()  # a counter, which each weight has for itself


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and bool(torch.equal(a, b))
    return bool(a == b)

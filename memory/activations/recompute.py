"""Second run of a function in its backward, in place of what its first run would save.

It does what torch.utils.checkpoint does without reentrance, for functions in which nothing is random and no autocast
is on. That one asks for more, at some seven Python calls for each tensor in the forward and a dozen in the backward:
1,500 for each block of FLUX. Here they are one and two.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Done(Exception):
    """Ends the second run once it has made what backward needs."""


class _SavedInputs(torch.autograd.Function):
    """Saves the inputs as any operation does: by the hooks that stand around it, and with their versions.

    Its output has to be held for as long as they are needed. The Python object of its node does not hold the node, and
    torch 2.11 frees what was saved as soon as nothing does.
    """

    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class _Call:
    """One call of a function: its inputs, the kinds of tensors that it saved, and the tensors once they are made anew.

    Autograd holds the number of a tensor where it would hold the tensor, and lets go of this with the last number.
    """

    def __init__(self, run: Callable[..., Any], args: tuple[Any, ...]):
        self.run = run
        self.args = [None if isinstance(arg, Tensor) else arg for arg in args]
        self.places = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        anchor = torch.empty(0, requires_grad=True)
        self.inputs: Any = _SavedInputs.apply(anchor, *(args[i] for i in self.places))
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []
        self.again: list[Tensor | None] | None = None

    def number(self, tensor: Tensor) -> int:
        """Take note of a tensor in place of saving it."""
        self.kinds.append((tensor.shape, tensor.dtype))
        return len(self.kinds) - 1

    def tensor(self, number: int) -> Tensor:
        """Return the tensor of this number, for the one time that backward asks for it."""
        if self.again is None:
            self._run_again()
        assert self.again is not None
        found, self.again[number] = self.again[number], None
        assert found is not None, "the second run of a checkpointed block saved less than its first, or is asked twice"
        return found

    def _run_again(self) -> None:
        args, self.again = self.args, []
        for i, tensor in zip(self.places, self.inputs.grad_fn.saved_tensors, strict=True):
            args[i] = tensor
        self.args, self.inputs = [], None
        try:
            with torch.enable_grad(), saved_tensors_hooks(self._keep, self.tensor):
                self.run(*args)
        except _Done:
            pass
        self.again += [None] * (len(self.kinds) - len(self.again))

    def _keep(self, tensor: Tensor) -> None:
        assert self.again is not None
        same = self.kinds[len(self.again)] == (tensor.shape, tensor.dtype)
        assert same, "the second run of a checkpointed block saves other tensors than its first"
        self.again.append(tensor.detach() if tensor.requires_grad else tensor)
        if len(self.again) == len(self.kinds):
            raise _Done


def run_twice(run: Callable[..., Any], *args: Any) -> Any:
    """Call `run(*args)`, and once more in its backward; of the tensors only those among `args` are saved."""
    if not torch.is_grad_enabled():
        return run(*args)
    call = _Call(run, args)
    with saved_tensors_hooks(call.number, call.tensor):
        return run(*args)

"""Full checkpointing with few Python calls: run a function again in its backward in place of saving its activations.

Equivalent to non-reentrant torch.utils.checkpoint for functions without randomness or autocast. That one handles more,
at some seven Python calls per tensor in the forward and a dozen in the backward: 1,500 per block of FLUX. Here they are
one and two.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Done(Exception):
    """Ends the recompute once all tensors that backward needs exist."""


class _SavedInputs(torch.autograd.Function):
    """Saves the inputs as any operation does: through the active saved-tensor hooks, with their version counters.

    Its output has to stay referenced while they are needed: the Python object of its node does not keep the node alive,
    and torch 2.11 frees the saved tensors with the node.
    """

    @staticmethod
    def forward(ctx, anchor, *tensors):
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class _Call:
    """One call of a function: its inputs, shapes and dtypes of the tensors it saved, and those tensors once recomputed.

    Autograd holds a tensor's number in place of the tensor, and frees this object with the last number.
    """

    def __init__(self, run: Callable[..., Any], args: tuple[Any, ...]):
        self.run = run
        self.args = [None if isinstance(arg, Tensor) else arg for arg in args]
        self.places = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        anchor = torch.empty(0, requires_grad=True)
        self.inputs: Any = _SavedInputs.apply(anchor, *(args[i] for i in self.places))
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []
        self.recomputed: list[Tensor | None] | None = None

    def number(self, tensor: Tensor) -> int:
        """Pack hook: record a tensor's shape and dtype in place of saving it."""
        self.kinds.append((tensor.shape, tensor.dtype))
        return len(self.kinds) - 1

    def tensor(self, number: int) -> Tensor:
        """Unpack hook: return the tensor of this number, once; backward asks for each only once."""
        if self.recomputed is None:
            self._run_again()
        assert self.recomputed is not None
        recomputed, self.recomputed[number] = self.recomputed[number], None
        assert recomputed is not None, (
            "the second run of a checkpointed block saved less than its first, or is asked twice"
        )
        return recomputed

    def _run_again(self) -> None:
        args, self.recomputed = self.args, []
        for i, tensor in zip(self.places, self.inputs.grad_fn.saved_tensors, strict=True):
            args[i] = tensor
        self.args, self.inputs = [], None
        try:
            with torch.enable_grad(), saved_tensors_hooks(self._keep, self.tensor):
                self.run(*args)
        except _Done:
            pass
        self.recomputed += [None] * (len(self.kinds) - len(self.recomputed))

    def _keep(self, tensor: Tensor) -> None:
        assert self.recomputed is not None
        matches = self.kinds[len(self.recomputed)] == (tensor.shape, tensor.dtype)
        assert matches, "the second run of a checkpointed block saves other tensors than its first"
        self.recomputed.append(tensor.detach() if tensor.requires_grad else tensor)
        if len(self.recomputed) == len(self.kinds):
            raise _Done


def run_twice(run: Callable[..., Any], *args: Any) -> Any:
    """Call `run(*args)`, and again in its backward; only the tensors among `args` are saved."""
    if not torch.is_grad_enabled():
        return run(*args)
    call = _Call(run, args)
    with saved_tensors_hooks(call.number, call.tensor):
        return run(*args)

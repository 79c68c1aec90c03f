"""Master weights of one parameter group in one tensor, so that a step launches few kernels whatever their number."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Each weight starts at a multiple of this many elements: 512 bytes in fp32, the alignment of CUDA's allocator.
_ALIGNMENT = 128


class FlatGroup:
    """Master weights of one parameter group as views of one tensor, and their gradients as views of another.

    The padding between them is zero in both, and an elementwise step keeps it zero.

    weights: the master weights; views of `master` from then on.
    master: (n,), fp32.
    gradient: (n,), fp32.
    gradients: views of `gradient`, in the weights' shapes.
    cast: (n,), `master` in the dtype of the computation; None if a forward reads the master weights directly.
    casts: parameters that a forward reads instead, views of `cast`; autograd accumulates the gradients in these.
    """

    def __init__(self, weights: Sequence[nn.Parameter], dtype: torch.dtype | None = None):
        self.weights = list(weights)
        self._begins: list[int] = []
        size = 0
        for weight in self.weights:
            self._begins.append(size)
            size += -(-weight.numel() // _ALIGNMENT) * _ALIGNMENT
        master = torch.zeros(size, dtype=self.weights[0].dtype, device=self.weights[0].device)
        for weight, part in zip(self.weights, self.parts(master), strict=True):
            part.copy_(weight.detach())
            weight.data = part
        self.master = nn.Parameter(master)
        self.gradient = torch.zeros_like(master)
        self.gradients = self.parts(self.gradient)
        self.cast = None if dtype is None else torch.zeros_like(master, dtype=dtype)
        self.casts = [] if self.cast is None else [nn.Parameter(part) for part in self.parts(self.cast)]
        self.write_casts()

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Return views of a tensor (n,), one for each weight in its shape."""
        return [self.part(flat, number) for number in range(len(self.weights))]

    def part(self, flat: Tensor, number: int) -> Tensor:
        """Return the view of a tensor (n,) at the offset of a weight, in its shape."""
        begin, shape = self._begins[number], self.weights[number].shape
        return flat[begin : begin + shape.numel()].view(shape)

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy tensors of the weights' shapes into a new one, (n,)."""
        flat = torch.zeros(self.master.shape, dtype=tensors[0].dtype, device=tensors[0].device)
        torch._foreach_copy_(self.parts(flat), list(tensors))
        return flat

    @torch.no_grad()
    def write_casts(self) -> None:
        """Update `cast` with one kernel. Called before each forward, so code that changes a weight need not call it.

        A backward through an earlier forward raises torch's error that its tensors were modified in place.
        """
        if self.cast is not None:
            self.cast.copy_(self.master)

    def move_gradient(self, buffer: Tensor) -> None:
        """Move `gradient` to this tensor (n,), a slice of a larger one. Called while no weight has a gradient.

        Raises AssertionError if one has.
        """
        assert buffer.shape == self.gradient.shape and all(weight.grad is None for weight in self.weights)
        self.gradient = buffer.zero_()
        self.gradients = self.parts(self.gradient)

    @property
    def is_complete(self) -> bool:
        """Return whether every weight has a gradient."""
        return all(weight.grad is not None for weight in self.weights)

    @torch.no_grad()
    def gather(self) -> None:
        """Move the gradients of a backward into `gradient`; each weight's `grad` is a view of it from then on.

        A weight without a gradient stays without. Autograd adds the gradients of later backwards in place.
        """
        fresh = [i for i, w in enumerate(self.weights) if w.grad is not None and w.grad is not self.gradients[i]]
        self._begin(fresh, [self.weights[i].grad for i in fresh])
        cast = [i for i, c in enumerate(self.casts) if c.grad is not None]
        first = [i for i in cast if self.weights[i].grad is None]
        later = [i for i in cast if self.weights[i].grad is not None]
        self._begin(first, [self.casts[i].grad for i in first])
        if later:
            # Summed in fp32: one upcasting copy and one add kernel, since mixed dtypes would be added tensor by tensor.
            wide = torch.zeros_like(self.gradient)
            gradients: list[Any] = [self.casts[i].grad for i in later]
            torch._foreach_copy_([self.part(wide, i) for i in later], gradients)
            self.gradient.add_(wide)
        for i in cast:
            self.casts[i].grad = None

    def _begin(self, numbers: Sequence[int], gradients: Sequence[Any]) -> None:
        if not numbers:
            return
        torch._foreach_copy_([self.gradients[i] for i in numbers], list(gradients))
        for i in numbers:
            self.weights[i].grad = self.gradients[i]

    def zero_grad(self) -> None:
        """Drop the gradients. The padding is zeroed too: a skipped NaN step would leave NaN there."""
        for weight in (*self.weights, *self.casts):
            weight.grad = None
        self.master.grad = None
        self.gradient.zero_()


class FlatGroups(list[FlatGroup]):
    """The flat groups of a network; none until its learner has made them."""

    def casts(self) -> dict[int, nn.Parameter]:
        """Return the casts by the identity of their master weights."""
        return {id(weight): cast for group in self for weight, cast in zip(group.weights, group.casts, strict=False)}

    def write_casts(self) -> None:
        """Write the casts that a forward reads; called before each one."""
        for group in self:
            group.write_casts()

    def gather(self) -> None:
        """Move the gradients of a backward into the flat ones."""
        for group in self:
            group.gather()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for group in self:
            group.zero_grad()

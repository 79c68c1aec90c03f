"""Forward of a swapped block, which runs on the weights in its slot."""

import copy
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, Protocol

from torch import nn

from ..host.flat_weights import BlockWeights


class Swap(Protocol):
    """Swapped blocks of a model. attached: whether they have their slots."""

    weights: BlockWeights

    @property
    def attached(self) -> bool: ...

    def enters_slot(self, j: int) -> bool:
        """Return whether block j needs `in_slot` for a call: not if it runs from its slot already."""
        ...

    def in_slot(self, j: int) -> AbstractContextManager[None]: ...


def run_class_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


class SwappedForward:
    """Instance `forward` of a swapped block.

    inner: the forward that another node had installed before.
    run: runs the block if there is no `inner`; compiled code is set here.
    """

    def __init__(self, swap: Swap, j: int, block: nn.Module, inner: Callable[..., Any] | None):
        # Weak, as the block holds this object: the swap lives as long as the MODELs that use it.
        self.swap, self.block = weakref.ref(swap), weakref.ref(block)
        self.j, self.inner = j, inner
        self.run: Callable[..., Any] = run_class_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        swap, block = self.swap(), self.block()
        assert block is not None
        run = self.inner or MethodType(self.run, block)
        # Another node's forward may hold this one and call it from inside itself, or after the swap has ended.
        if swap is None or not swap.enters_slot(self.j):
            return run(*args, **kwargs)
        with swap.in_slot(self.j):
            return run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Give a copy of the block its ordinary forward."""
        block: Any = copy.deepcopy(self.block(), memo)
        return copy.deepcopy(self.inner, memo) if self.inner else MethodType(type(block).forward, block)


def swapped_forward(block: nn.Module) -> SwappedForward | None:
    """Return the block's `SwappedForward` if it is swapped and its model is loaded, else None."""
    forward = vars(block).get("forward")
    return forward if isinstance(forward, SwappedForward) else None


def install_forwards(swap: Swap) -> None:
    """Make the blocks run from their slots, wrapping any forwards of other nodes; nothing to do without slots."""
    if not swap.attached:
        return
    for j, block in enumerate(swap.weights.blocks.values()):
        forward = vars(block).get("forward")
        if isinstance(forward, SwappedForward) and forward.swap() is swap:
            continue
        while isinstance(forward, SwappedForward):
            forward = forward.inner
        # ComfyUI leaves the class's forward on the instance when it undoes an object patch.
        is_class_forward = forward == MethodType(type(block).forward, block)
        vars(block)["forward"] = SwappedForward(swap, j, block, None if is_class_forward else forward)


def remove_forwards(swap: Swap) -> None:
    """Restore the previous forwards; the slots stay."""
    for block in swap.weights.blocks.values():
        forward = vars(block).get("forward")
        if isinstance(forward, SwappedForward) and forward.swap() in (swap, None):
            if forward.inner is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = forward.inner

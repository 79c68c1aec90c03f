"""Stack: a list of blocks compiled as one region, with the wiring recorded in an eager pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class BlockWiring:
    """Outputs of a block that are inputs of the next; all other inputs are the same for all blocks.

    links: (place of the output, place of the input) pairs. The place of an output is its index, or -1 if the block
        returns one tensor; that of an input is its index or its name.
    """

    links: tuple[tuple[int, int | str], ...]


def run_stack(blocks: tuple[nn.Module, ...], wiring: BlockWiring, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run all blocks one after the other: the body of a stack's region."""
    out = None
    for block in blocks:
        if out is not None:
            positional, keywords = list(args), dict(kwargs)
            for place, target in wiring.links:
                value = out if place < 0 else out[place]
                if isinstance(target, int):
                    positional[target] = value
                else:
                    keywords[target] = value
            args, kwargs = tuple(positional), keywords
        out = type(block).forward(block, *args, **kwargs)
    return out


@dataclass(frozen=True)
class BlockCall:
    """Arguments and result of one block's call.

    args: positional arguments.
    kwargs: keyword arguments.
    out: result; None until the call has returned.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any = None


class WiringTracer:
    """Tracer of the calls of one list's blocks in an eager pass, which derives their wiring.

    Call `before_block` and `after_block` around each block's own forward. Only the previous call is stored, so that
    the pass needs no extra memory, except for a copy of the first inputs and of the last outputs.
    """

    def __init__(self, blocks: Sequence[nn.Module]):
        self.blocks = tuple(blocks)
        self._blocks_traced = 0
        self._links: tuple[tuple[int, int | str], ...] | None = None
        self._reason: str | None = None
        self._call: BlockCall | None = None
        self._first: BlockCall | None = None
        self._last: Any = None

    def before_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._blocks_traced >= len(self.blocks) or block is not self.blocks[self._blocks_traced]:
            self._reason = "the model does not run its blocks once each and in order"
        call = BlockCall(args, dict(kwargs))
        if self._call is None:
            self._first = BlockCall(_copies(args), _copies(kwargs))
        elif self._reason is None:
            links = _links(self._call, call)
            if links is None or (self._links is not None and links != self._links):
                self._reason = "the model computes something between its blocks"
            self._links = links
        self._call = call
        self._blocks_traced += 1

    def after_block(self, out: Any) -> None:
        assert self._call is not None
        self._call = replace(self._call, out=out)
        if self._blocks_traced == len(self.blocks):
            self._last = _copies(out)

    def wiring(self) -> BlockWiring | str:
        """Return the wiring, or the reason the blocks can't run as one region, as the end of a sentence."""
        if self._reason is None and self._blocks_traced != len(self.blocks):
            self._reason = "the model does not run its blocks once each and in order"
        if self._reason is not None:
            return self._reason
        assert self._links is not None and self._first is not None
        self._call = None
        wiring = BlockWiring(self._links)
        # An in-place change between two blocks shows only in the result.
        if not _equal(run_stack(self.blocks, wiring, self._first.args, self._first.kwargs), self._last):
            return "the model changes the blocks' results between them"
        return wiring


def _copies(value: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, value)


def _links(earlier: BlockCall, later: BlockCall) -> tuple[tuple[int, int | str], ...] | None:
    """Return which results of a call are which arguments of the next; None if other arguments differ."""
    before, after = _arguments(earlier), _arguments(later)
    if before.keys() != after.keys():
        return None
    outputs = _tensors_of(earlier.out)
    links: list[tuple[int, int | str]] = []
    for target, value in after.items():
        place = next((place for place, out in outputs if value is out), None)
        if place is not None:
            links.append((place, target))
        elif not _is_passed_on(value, before[target]):
            return None
    return tuple(links) if links else None


def _arguments(call: BlockCall) -> dict[int | str, Any]:
    """Return a call's arguments by position or name."""
    pairs: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    return dict(pairs)


def _tensors_of(out: Any) -> list[tuple[int, Tensor]]:
    """Return the tensors of a result with their places in it, -1 for the result itself."""
    places = enumerate(out) if isinstance(out, tuple | list) else [(-1, out)]
    return [(place, value) for place, value in places if isinstance(value, Tensor)]


def _is_passed_on(value: Any, previous: Any) -> bool:
    """Return whether an argument is that of the previous call."""
    if isinstance(value, dict) and isinstance(previous, dict):
        return True  # the options, which carry no code here
    return value is previous or _is_unchanged(value, previous)


def _is_unchanged(a: Any, b: Any) -> bool:
    """Return whether both are equal and not tensors: a new tensor between two blocks was computed there. Tuples of the
    same tensors are equal."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(x is y or _is_unchanged(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "__dict__") and type(a) is type(b) and not isinstance(a, Tensor | nn.Module):
        return _is_unchanged(tuple(vars(a).values()), tuple(vars(b).values()))
    return not isinstance(a, Tensor) and type(a) is type(b) and bool(a == b)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


class StackModule(nn.Module):
    """Replacement of all blocks of a list, in the model's list, during one call."""

    def __init__(self, run: Any):
        super().__init__()
        self._run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs)

"""A block of ComfyUI's model as the trainer runs it: compiled, checkpointed and swapped like our own families'."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..blocks import BlockOfModel
from ..family import Block, ModelInputs
from .comfyui.entries import Running
from .shadow import NativeLayer, SharedTensors
from .writes.out_of_place import out_of_place

# Attributes by which a block knows its place. Where its forward reads one, each block has a graph of its own.
_PLACES = frozenset(
    {"idx", "index", "i", "layer_idx", "layer_id", "layer_index", "block_idx", "block_id", "block_index"}
)


class _At(NamedTuple):
    """The place of a tensor in a call."""

    number: int


class Call(NamedTuple):
    """A call's arguments apart from the tensors, in whose place stands their number.

    samples: b, the samples that the tensors are of.
    method: of the block, that is called.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int
    method: str = "forward"


def flatten(
    args: Sequence[Any], kwargs: Mapping[str, Any], samples: int, method: str = "forward"
) -> tuple[list[Tensor], Call]:
    """The tensors of a call, each once, and what is needed to make the call of them again."""
    tensors: list[Tensor] = []

    def placed(value: Any) -> Any:
        if isinstance(value, Tensor):
            for number, known in enumerate(tensors):
                if known is value:
                    return _At(number)
            tensors.append(value)
            return _At(len(tensors) - 1)
        if type(value) in (list, tuple):
            return type(value)(placed(inner) for inner in value)
        if type(value) is dict:
            return {name: placed(inner) for name, inner in value.items()}
        return value

    return tensors, Call(placed(tuple(args)), placed(dict(kwargs)), samples, method)


def unflatten(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Put the tensors in their places again."""
    if type(value) is _At:
        return tensors[value.number]
    if type(value) is list:
        return [unflatten(inner, tensors) for inner in value]
    if type(value) is tuple:
        return tuple([unflatten(inner, tensors) for inner in value])
    if type(value) is dict:
        return {name: unflatten(inner, tensors) for name, inner in value.items()}
    return value


class NativeBlock(Block):
    """core: the object that runs a block of the shadow; tensors: what holds its weights beside the Linears; results:
    how what a method of a block returns is made of tensors, by the names of both, which its first run shows, eager as
    it is."""

    shapes_known = False

    def __init__(
        self,
        block: BlockOfModel,
        core: nn.Module,
        tensors: Sequence[SharedTensors],
        varying: str,
        results: dict[tuple[str, str], Any],
    ):
        super().__init__()
        self.kind = type(core).__name__
        self.name, self.core = block.name, core
        self.tensors = nn.ModuleList(tensors)
        self._linears = {name: m for name, m in core.named_modules() if isinstance(m, NativeLayer)}
        self._likeness = f"{block.kind.partition(':')[2]}{varying}"
        self._rows: dict[Any, dict[str, tuple[int, int]]] = {}
        self.call: tuple[Sequence[Tensor], Call] | None = None
        self._results = results
        self.running = Running(block.name)
        for name, linear in self._linears.items():
            linear.place = name, self.running

    def linears(self) -> dict[str, NativeLayer]:
        return self._linears

    def native_name(self, name: str) -> str:
        return name

    def structure(self) -> str:
        kind, _, rest = super().structure().partition(":")
        return f"{kind}:{self._likeness};{rest}"

    def mask_shapes(self, inputs: ModelInputs) -> dict[str, tuple[int, int]]:
        """(samples, rows) that each Linear with an adapter sees of this call. The first call of each shape is run once
        more to count them."""
        assert self.call is not None
        tensors, call = self.call
        key = (call.method, call.samples, *(tuple(t.shape) for t in tensors))
        if key not in self._rows:
            self._rows[key] = self._count(tensors, call)
        return self._rows[key]

    def _count(self, tensors: Sequence[Tensor], call: Call) -> dict[str, tuple[int, int]]:
        for linear in self._linears.values():
            linear.seen = set()
        with torch.no_grad():
            self(*tensors, call, {})
        # One that is called with several shapes has no mask.
        found = {name: next(iter(x.seen)) for name, x in self._linears.items() if x.seen and len(x.seen) == 1}
        for linear in self._linears.values():
            linear.seen = None
        return found

    def forward(self, *args: Any) -> Any:
        """args: the tensors, the Call and the dropout masks → a tensor or a tuple of tensors."""
        tensors, call, masks = args[:-2], args[-2], args[-1]
        for name, linear in self._linears.items():
            linear.samples, linear.mask = call.samples, masks.get(name)
        out = out_of_place(self, self.run_core, *tensors, call=call)
        for linear in self._linears.values():
            linear.mask = None
        return out

    def run_core(self, *tensors: Tensor, call: Call) -> Any:
        """Call the block's own method."""
        args, kwargs = unflatten(call.args, tensors), unflatten(call.kwargs, tensors)
        method = getattr(type(self.core), call.method)
        if torch.compiler.is_compiling():
            found, result = flatten((method(self.core, *args, **kwargs),), {}, call.samples)
        else:
            with self.running:
                out = method(self.core, *args, **kwargs)
            found, result = flatten((out,), {}, call.samples)
            self._results[self.name, call.method] = result.args
        return found[0] if len(found) == 1 else tuple(found)

    def has_run(self, method: str) -> bool:
        return (self.name, method) in self._results

    def take_result(self, other: "NativeBlock", method: str) -> None:
        """Return what a block of the same structure, which has run, returns."""
        self._results[self.name, method] = self._results[other.name, method]

    def result(self, out: Any, method: str) -> Any:
        """Restore what the block's own method returned from the tensors of `forward`."""
        return unflatten(self._results[self.name, method], (out,) if isinstance(out, Tensor) else out)[0]


def varying_attributes(cores: Sequence[nn.Module]) -> list[str]:
    """The plain values in which blocks of one kind differ, as text for each; those that only tell a block's place are
    left out."""
    plain = []
    for core in cores:
        found = {}
        for name, module in core.named_modules():
            for attribute, value in vars(module).items():
                simple = isinstance(value, bool | int | float | str) or value is None
                if simple and attribute not in _PLACES and not attribute.startswith("_"):
                    found[f"{name}.{attribute}"] = value
        plain.append(found)
    different = {key for found in plain for key in found if any(found[key] != other.get(key) for other in plain)}
    return ["".join(f"|{key}={found.get(key)!r}" for key in sorted(different)) for found in plain]

"""A block of ComfyUI's model in the trainer: compiled, checkpointed and swapped like those of our own families."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...blocks import BlockOfModel
from ...family import Block, ModelInputs
from ..comfyui.entries import Running
from ..writes.out_of_place import out_of_place
from .shadow import NativeLayer, SharedTensors

# Attributes that hold a block's index. If its forward reads one, each block has a separate graph.
_PLACES = frozenset(
    {"idx", "index", "i", "layer_idx", "layer_id", "layer_index", "block_idx", "block_id", "block_index"}
)


class _At(NamedTuple):
    """Index of a tensor in a call."""

    number: int


class Call(NamedTuple):
    """The arguments of a call, with each tensor replaced by its index.

    args: positional arguments.
    kwargs: keyword arguments.
    samples: b, the batch size of the tensors.
    method: name of the called method of the block.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int
    method: str = "forward"


def flatten(
    args: Sequence[Any], kwargs: Mapping[str, Any], samples: int, method: str = "forward"
) -> tuple[list[Tensor], Call]:
    """Split a call into its tensors, each once, and a `Call` to rebuild it from them."""
    tensors: list[Tensor] = []

    def placed(value: Any) -> Any:
        if isinstance(value, Tensor):
            for number, tensor in enumerate(tensors):
                if tensor is value:
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
    """Insert the tensors for their indices."""
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
    """core: the object that runs a block of the shadow; tensors: its weights other than the Linears'; results: the
    structure of a method's return value, by block and method name, recorded in its first, eager run."""

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
            linear.put_into_block(name, self.running)

    def expect_shapes(self, number: int) -> None:
        """Set the guess of how many input shapes one batch gives blocks of this structure."""
        self.shapes = number

    def begin_call(self, tensors: Sequence[Tensor], call: Call) -> None:
        """Hold the arguments of the call that runs next, from which its masks are made."""
        self.call = tensors, call

    def end_call(self) -> None:
        """Forget the call's arguments: they would hold the step's graph until the next call."""
        self.call = None

    def linears(self) -> dict[str, NativeLayer]:
        return self._linears

    def native_name(self, name: str) -> str:
        return name

    def structure(self) -> str:
        kind, _, rest = super().structure().partition(":")
        return f"{kind}:{self._likeness};{rest}"

    def mask_shapes(self, inputs: ModelInputs) -> dict[str, tuple[int, int]]:
        """Return the (samples, rows) that each Linear with an adapter sees in this call. The first call of each shape
        is run once more to count them."""
        assert self.call is not None
        tensors, call = self.call
        key = (call.method, call.samples, *(tuple(t.shape) for t in tensors))
        if key not in self._rows:
            self._rows[key] = self._count(tensors, call)
        return self._rows[key]

    def _count(self, tensors: Sequence[Tensor], call: Call) -> dict[str, tuple[int, int]]:
        for linear in self._linears.values():
            linear.record_shapes()
        with torch.no_grad():
            self(*tensors, call, {})
        recorded = {name: linear.recorded_shapes() for name, linear in self._linears.items()}
        # A Linear called with several shapes has no mask.
        return {name: next(iter(shapes)) for name, shapes in recorded.items() if len(shapes) == 1}

    def forward(self, *args: Any) -> Any:
        """Run the block. args: the tensors, the Call and the dropout masks → a tensor or a tuple of tensors."""
        tensors = args[:-2]
        call = args[-2]
        masks = args[-1]
        for name, linear in self._linears.items():
            linear.begin_call(call.samples, masks.get(name))
        out = out_of_place(self, self.run_core, *tensors, call=call)
        for linear in self._linears.values():
            linear.end_call()
        return out

    def run_core(self, *tensors: Tensor, call: Call) -> Any:
        """Call the block's own method."""
        args, kwargs = unflatten(call.args, tensors), unflatten(call.kwargs, tensors)
        method = getattr(type(self.core), call.method)
        if torch.compiler.is_compiling():
            outputs, result = flatten((method(self.core, *args, **kwargs),), {}, call.samples)
        else:
            with self.running:
                out = method(self.core, *args, **kwargs)
            outputs, result = flatten((out,), {}, call.samples)
            self._results[self.name, call.method] = result.args
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def has_run(self, method: str) -> bool:
        return (self.name, method) in self._results

    def take_result(self, other: "NativeBlock", method: str) -> None:
        """Take over the return structure of a block of the same structure that has run."""
        self._results[self.name, method] = self._results[other.name, method]

    def result(self, out: Any, method: str) -> Any:
        """Rebuild the return value of the block's own method from the tensors of `forward`."""
        return unflatten(self._results[self.name, method], (out,) if isinstance(out, Tensor) else out)[0]


def varying_attributes(cores: Sequence[nn.Module]) -> list[str]:
    """Describe the plain values in which blocks of one kind differ, as text for each; those that only hold a block's
    index are left out."""
    plain = [_plain_attributes(core) for core in cores]
    keys = {key for attributes in plain for key in attributes}
    different = [key for key in sorted(keys) if _differs(key, plain)]
    return ["".join(f"|{key}={attributes.get(key)!r}" for key in different) for attributes in plain]


def _differs(key: str, plain: Sequence[Mapping[str, Any]]) -> bool:
    values = [attributes[key] for attributes in plain if key in attributes]
    all_values = [attributes.get(key) for attributes in plain]
    return any(value != other for value in values for other in all_values)


def _plain_attributes(core: nn.Module) -> dict[str, Any]:
    """Return the plain values of a block's modules by their names, but for its index."""
    attributes = {}
    for name, module in core.named_modules():
        for attribute, value in vars(module).items():
            is_plain = isinstance(value, bool | int | float | str) or value is None
            if is_plain and attribute not in _PLACES and not attribute.startswith("_"):
                attributes[f"{name}.{attribute}"] = value
    return attributes

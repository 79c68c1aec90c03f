"""Tables of torch's functions by their effect on memory: writes, views, splits, or queries."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import get_overridable_functions

# They change metadata of a tensor that a new one can't represent.
_METADATA = ("transpose_", "t_", "swapaxes_", "swapdims_", "as_strided_", "squeeze_", "unsqueeze_")
_NO_WRITE = ("requires_grad_", "retain_grad_", "share_memory_", "rename_")
_RANDOM = ("bernoulli_",)  # bernoulli reads its tensor as probabilities, bernoulli_ does not read it
_OPERATORS = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}
_OPERATORS |= {name: name for name in ("add", "sub", "mul", "pow", "div")}
_OPERATORS |= {name: f"__{name}__" for name in ("and", "or", "xor", "lshift", "rshift")}


def _in_place() -> dict[Any, Callable[..., Tensor] | None]:
    """Map torch's in-place functions to those that return a new tensor; None if there is none.

    Keys are the functions themselves: dynamo traces such a table, but breaks the graph at tests of names.
    """
    twins: dict[Any, Callable[..., Tensor] | None] = {}
    for holder in (Tensor, torch, F):
        for name in dir(holder):
            if name.endswith("_") and not name.startswith("_") and name not in _METADATA + _NO_WRITE:
                twin = None if name in _RANDOM else getattr(holder, name[:-1], None)
                twins[getattr(holder, name)] = twin if callable(twin) else None
    for operator, name in _OPERATORS.items():
        if hasattr(Tensor, f"__i{operator}__"):
            twins[getattr(Tensor, f"__i{operator}__")] = getattr(Tensor, name)
    twins[Tensor.__setitem__] = None
    return twins


def _functions(*names: str) -> list[Any]:
    """Collect functions of these names from Tensor and torch, including attribute getters."""
    attributes = [getattr(holder, name) for holder in (Tensor, torch) for name in names if hasattr(holder, name)]
    return [f if callable(f) else f.__get__ for f in attributes if callable(f) or hasattr(f, "__get__")]


IN_PLACE = _in_place()
# Position of `inplace` in functions that take it.
INPLACE_AT = {
    function: list(inspect.signature(function).parameters).index("inplace")
    for function in vars(F).values()
    if inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters
}
REFUSED = frozenset(function for name in _METADATA for function in _functions(name))
# They query properties of a tensor that no write changes.
FACTS = frozenset(
    _functions("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_meta", "itemsize", "nbytes")
    + _functions("size", "dim", "numel", "nelement", "element_size", "get_device", "is_floating_point", "is_complex")
    + [Tensor.__len__]
)
# Functions that split a tensor, with the position of `dim`.
CUTS = {cut: 2 for cut in _functions("chunk", "split", "split_with_sizes", "tensor_split")}
UNBIND = {unbind: 1 for unbind in _functions("unbind")}
# Functions that return their input if they drop nothing, with the positions of `p` and `training`.
DROPOUTS = {
    function: (names.index("p"), names.index("training"), signature.parameters["training"].default)
    for function in vars(F).values()
    if inspect.isfunction(function)
    and {"p", "training"} <= (signature := inspect.signature(function)).parameters.keys()
    and (names := list(signature.parameters))
} | {function: (1, 2, True) for function in _functions("dropout", "alpha_dropout")}
DETACH = frozenset(_functions("detach", "data"))
AS_STRIDED = frozenset(_functions("as_strided"))  # offsets are in memory, which a new tensor may lay out differently
FACTORIES = frozenset(
    _functions("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like", "clone")
    + _functions("new_empty", "new_zeros", "new_ones", "new_full")
)
# Dynamo passes these to a mode; it hides all others, except calls of operators.
VISIBLE = (
    {function for functions in get_overridable_functions().values() for function in functions if callable(function)}
    | {function for name in dir(Tensor) if callable(function := getattr(Tensor, name))}
) - {Tensor.__setitem__, Tensor.pow_, Tensor.__ipow__, *_functions("real", "imag", "data")}
PLAIN = VISIBLE - {*IN_PLACE, *INPLACE_AT, *REFUSED, *DROPOUTS}  # for speed; dynamo does not find all of them in a set
OPERATORS_OF_TORCH = torch._ops.OperatorBase, torch._ops.OpOverloadPacket

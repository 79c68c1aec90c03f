"""Run in-place code out of place, so that autograd and checkpointing keep the values that they saved.

ComfyUI's blocks are written for sampling: `x += …`, `q.mul_(…)`, `x[:, :n] = …`. Under autograd such a write raises, or
inside a checkpoint changes gradients without an error. Here each write makes a new tensor, which takes the place of the
old one and of its views wherever the code uses them later. Dynamo traces all of it.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, get_overridable_functions

# How a view was made: a function and what it got behind the tensor that it views.
Step = tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]

# They change of a tensor what no new one can stand for.
_METADATA = ("transpose_", "t_", "swapaxes_", "swapdims_", "as_strided_", "squeeze_", "unsqueeze_")
_NO_WRITE = ("requires_grad_", "retain_grad_", "share_memory_", "rename_")
_RANDOM = ("bernoulli_",)  # bernoulli takes its tensor for probabilities, bernoulli_ does not read it
_OPERATORS = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}
_OPERATORS |= {name: name for name in ("add", "sub", "mul", "pow", "div")}
_OPERATORS |= {name: f"__{name}__" for name in ("and", "or", "xor", "lshift", "rshift")}


def _in_place() -> dict[Any, Callable[..., Tensor] | None]:
    """Map torch's in-place functions to those that return a new tensor; None where there is none.

    Keys are the functions themselves: dynamo traces such a table, and breaks the graph at tests of their names.
    """
    twins: dict[Any, Callable[..., Tensor] | None] = {}
    for holder in (Tensor, torch, F):
        for name in dir(holder):
            if name.endswith("_") and not name.startswith("_") and name not in (*_METADATA, *_NO_WRITE):
                twin = None if name in _RANDOM else getattr(holder, name[:-1], None)
                twins[getattr(holder, name)] = twin if callable(twin) else None
    for operator, name in _OPERATORS.items():
        if hasattr(Tensor, f"__i{operator}__"):
            twins[getattr(Tensor, f"__i{operator}__")] = getattr(Tensor, name)
    twins[Tensor.__setitem__] = None
    return twins


def _functions(*names: str) -> list[Any]:
    """Collect functions of these names from Tensor and torch, getters of attributes too."""
    found = [getattr(holder, name) for holder in (Tensor, torch) for name in names if hasattr(holder, name)]
    return [f if callable(f) else f.__get__ for f in found if callable(f) or hasattr(f, "__get__")]


IN_PLACE = _in_place()
# Position of `inplace` in functions that take it.
_INPLACE_AT = {
    function: list(inspect.signature(function).parameters).index("inplace")
    for function in vars(F).values()
    if inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters
}
_REFUSED = frozenset(_functions(*_METADATA))
# They tell of a tensor what no write changes.
_FACTS = frozenset(
    _functions("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_meta", "itemsize", "nbytes")
    + _functions("size", "dim", "numel", "nelement", "element_size", "get_device", "is_floating_point", "is_complex")
    + [Tensor.__len__]
)
# Functions that cut a tensor in parts, with the position of `dim`.
_CUTS = {cut: 2 for cut in _functions("chunk", "split", "split_with_sizes", "tensor_split")}
_UNBIND = {unbind: 1 for unbind in _functions("unbind")}
_DETACH = frozenset(_functions("detach", "data"))
_AS_STRIDED = frozenset(_functions("as_strided"))  # counts in memory, which a new tensor may lay out otherwise
_FACTORIES = frozenset(
    _functions("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like", "clone")
    + _functions("new_empty", "new_zeros", "new_ones", "new_full")
)
# Dynamo hands these to a mode; all else it hides, but for calls of operators.
_VISIBLE = (
    {function for functions in get_overridable_functions().values() for function in functions if callable(function)}
    | {function for name in dir(Tensor) if callable(function := getattr(Tensor, name))}
) - {Tensor.__setitem__, Tensor.pow_, Tensor.__ipow__, *_functions("real", "imag", "data")}
_PLAIN = _VISIBLE - {*IN_PLACE, *_INPLACE_AT, *_REFUSED}  # for speed; dynamo finds not all of them in a set
_OPERATORS_OF_TORCH = torch._ops.OperatorBase, torch._ops.OpOverloadPacket


class Place:
    """A tensor as the code knows it, whatever new tensors hold its values.

    value: the tensor that held them when it was last looked up.
    seen: how many writes to its memory that value knows.
    memory: number of the memory that it shares with its views.
    base: the place that it is a view of; None for the whole memory.
    step: the way from the base to it; None where it is not known.
    cut: number of the call that cut it from its base, 0 for none; parts of one cut do not overlap.
    """

    def __init__(self, value: Tensor, seen: int, memory: int, base: "Place | None", step: Step | None, cut: int):
        self.value, self.seen, self.memory = value, seen, memory
        self.base, self.step, self.cut = base, step, cut


class OutOfPlace(TorchFunctionMode):
    """Calls in-place functions out of place, and hands on the new tensor wherever the old one is used later.

    Views are remembered with the way they were made: a write to a view is put into its base when the base or another
    view is used, and views of a written base are made anew. Tensors that come from outside count as separate memory.

    where: name of the block, for messages.
    hidden: True after code that a compiled run would not follow, since dynamo hides it from every mode: a write such as
        `x[i] = …`, or what reads written memory, such as iteration over it.

    Raises NotImplementedError, with the function and the block, for a write that can't be followed.
    """

    def __init__(self, where: str):
        super().__init__()
        self.where = where
        self.places: dict[Tensor, Place] = {}  # by every tensor that ever stood for one; a tensor's hash is its id
        self.writes: list[list[Place]] = []  # of each memory
        self.cuts = 0
        self.eager = not torch.compiler.is_compiling()
        self.written = False
        self.hiding = False  # the call at hand is one that dynamo hides
        self.renewed: set[int] = set()  # memories of its arguments that others stand for now
        # Memories: made here, written in ways that dynamo hides or shows, and used in ways that it hides.
        self.fresh: set[int] = set()
        self.hidden_writes: set[int] = set()
        self.shown_writes: set[int] = set()
        self.hidden_uses: set[int] = set()

    @property
    def hidden(self) -> bool:
        # Where dynamo hides every write to memory of a block's own, the graph writes it as the code does.
        changed = self.hidden_writes - (self.fresh - self.shown_writes)
        return bool(changed or self.hidden_uses & self.shown_writes)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            return func(*args, **kwargs)
        now, named = args, kwargs
        if self.written:
            if self.eager:
                self.renewed.clear()
            now = tuple([self.current(value, func) for value in args])
            if kwargs:
                named = {name: self.current(value, func) for name, value in kwargs.items()}
        self.hiding = False
        if not (self.eager and func in _PLAIN):
            if self.eager and not (func in _VISIBLE or isinstance(func, _OPERATORS_OF_TORCH)):
                self.hiding = True
                self.hidden_uses |= self.renewed
            if func in IN_PLACE:
                return self._write_in_place(func, args, kwargs, now, named)
            if func in _INPLACE_AT:
                at = _INPLACE_AT[func]
                if named.get("inplace") or (len(now) > at and now[at]):
                    now, named = now[:at], {**named, "inplace": False}
                    return self._write(args[0] if args else kwargs["input"], func(*now, **named))
            self._refuse_writing(func)
        if "out" in named and named["out"] is not None:
            out = kwargs["out"]
            if not isinstance(out, Tensor):
                raise NotImplementedError(f"{self.where} calls {func.__name__} with several tensors as out.")
            return self._write(out, func(*now, **{name: value for name, value in named.items() if name != "out"}))
        result = func(*now, **named)
        if isinstance(result, Tensor):
            if self.eager and func in _FACTORIES:
                self.fresh.add(self._place(result).memory)
            if result._base is not None or func in _DETACH:
                self._note_view(func, now, result, (func, now[1:], named), 0)
        elif isinstance(result, tuple | list):
            self._note_parts(func, now, named, result)
        return result

    def current(self, value: Any, func: Any = None) -> Any:
        """Put what is there now in the place of each tensor of a structure of tuples, lists and dicts."""
        if isinstance(value, Tensor):
            place = self.places.get(value)
            if place is None:
                return value
            now = self._read(place, func)
            if self.eager and now is not value:
                self.renewed.add(place.memory)
            return now
        if type(value) is list:
            return [self.current(inner, func) for inner in value]
        if type(value) is tuple:
            return tuple([self.current(inner, func) for inner in value])
        if type(value) is dict:
            return {name: self.current(inner, func) for name, inner in value.items()}
        return value

    def _refuse_writing(self, func: Any) -> None:
        """Raise for functions that write and that are not known by another that returns a new tensor."""
        if func in _REFUSED:
            raise NotImplementedError(f"{self.where} calls {func.__name__}, a write that training can't follow.")
        if self.eager:
            overload = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
            if overload or (isinstance(func, torch._ops.OpOverloadPacket) and func.__name__.endswith("_")):
                raise NotImplementedError(f"{self.where} calls {func}, a write that training can't follow.")

    def _read(self, place: Place, func: Any) -> Tensor:
        """Return what the place holds after all writes to its memory."""
        writes = self.writes[place.memory]
        later = writes[place.seen :]
        if later:
            if any([not place.cut or write.cut != place.cut for write in later]):
                place.value = self._with_writes(place, later, func) if place.base is None else self._view(place, func)
                self.places[place.value] = place
            place.seen = len(writes)
        return place.value

    def _view(self, place: Place, func: Any) -> Tensor:
        if place.base is None or place.step is None:
            raise self._lost(func)
        step, args, kwargs = place.step
        return step(self._read(place.base, func), *args, **kwargs)

    def _with_writes(self, whole: Place, writes: list[Place], func: Any) -> Tensor:
        """Return a copy of a memory's values with those of written views put in."""
        changed = whole.value.clone()
        for write in writes:
            steps, place = [], write
            while place.base is not None:
                steps.append(place.step)
                place = place.base
            view = changed
            for step in reversed(steps):
                if step is None:
                    raise self._lost(func)
                view = step[0](view, *step[1], **step[2])
            if view._base is None:  # a copy, since the new tensor lies otherwise in memory
                raise self._lost(func)
            view.copy_(write.value)
        return changed

    def _lost(self, func: Any) -> NotImplementedError:
        name = getattr(func, "__name__", "its result")
        return NotImplementedError(
            f"{self.where} uses a tensor in {name} after it was written through another view, which training can't "
            "follow."
        )

    def _write_in_place(self, func: Any, args: Any, kwargs: Any, now: Any, named: Any) -> Tensor | None:
        target = args[0] if args else kwargs["input"]
        twin = IN_PLACE[func]
        if twin is not None:
            return self._write(target, twin(*now, **named))
        copy = self.current(target, func).clone()
        func(copy, *now[1:], **{name: value for name, value in named.items() if name != "input"})
        self._write(target, copy)
        return None if func is Tensor.__setitem__ else copy

    def _write(self, target: Tensor, value: Tensor) -> Tensor:
        """Let `value` be what the place of `target` holds, in the dtype that it has."""
        if value.dtype != target.dtype:
            value = value.to(target.dtype)
        if value.shape != target.shape:
            raise NotImplementedError(
                f"{self.where} writes {tuple(value.shape)} into {tuple(target.shape)}, which training can't follow."
            )
        place = self._place(target)
        self.writes[place.memory].append(place)
        place.value, place.seen = value, len(self.writes[place.memory])
        self.places[value] = place
        self.written = True
        if self.eager:
            (self.hidden_writes if self.hiding else self.shown_writes).add(place.memory)
        return value

    def _place(self, tensor: Tensor) -> Place:
        found = self.places.get(tensor)
        if found is None:
            self.writes.append([])
            found = self.places[tensor] = Place(tensor, 0, len(self.writes) - 1, None, None, 0)
        return found

    def _note_parts(self, func: Any, now: Any, named: Any, parts: Any) -> None:
        """Remember how the views in a tuple or list were made."""
        self.cuts += 1
        start = 0
        for i, part in enumerate(parts):
            if not isinstance(part, Tensor):
                return
            step: Step | None = None
            if func in _UNBIND:
                step = Tensor.select, (_dim(now, named, _UNBIND[func]), i), {}
            elif func in _CUTS:
                dim = _dim(now, named, _CUTS[func])
                step = Tensor.narrow, (dim, start, part.shape[dim]), {}
                start += part.shape[dim]
            self._note_view(func, now, part, step, 0 if step is None else self.cuts)

    def _note_view(self, func: Any, now: Any, result: Tensor, step: Step | None, cut: int) -> None:
        base: Tensor | None = now[0] if func in _DETACH else result._base
        if base is None or result in self.places:
            return
        source = now[0] if now and isinstance(now[0], Tensor) else None
        if source is None or func in _DETACH or func in _AS_STRIDED or not (base is source or base is source._base):
            step, cut = None, 0
        parent = self._place(base if step is None or source is None else source)
        seen = len(self.writes[parent.memory])
        self.places[result] = Place(result, seen, parent.memory, parent, step, cut)
        if self.eager and (func not in _VISIBLE or (func in _UNBIND and _iterates())):
            self.hidden_uses.add(parent.memory)


def _dim(now: Any, named: Any, position: int) -> int:
    return named["dim"] if "dim" in named else now[position] if len(now) > position else 0


def _iterates() -> bool:
    """Return True where Python's iteration over a tensor called `unbind`."""
    return sys._getframe(4).f_code is Tensor.__iter__.__code__


_watching: list[set[str]] = []


@contextmanager
def blocks_to_leave_eager() -> Iterator[set[str]]:
    """Collect the names of blocks, run eager in here, whose in-place code a compiled run would not follow."""
    found: set[str] = set()
    _watching.append(found)
    try:
        yield found
    finally:
        _watching.remove(found)


def out_of_place(where: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` with its in-place code out of place. What it returns holds the tensors of the end.

    Arguments are not written: what `function` writes to them, its result shows.

    where: name of the block, for messages; compiled code does not look at it, so that like blocks share one graph.

    Raises NotImplementedError, with the function and the block, for a write that can't be followed.
    """
    mode = OutOfPlace("A compiled block" if torch.compiler.is_compiling() else where)
    with mode:
        result = function(*args, **kwargs)
    if not torch.compiler.is_compiling() and mode.hidden:
        for found in _watching:
            found.add(where)
    return mode.current(result)

"""Run in-place code out of place, so that values saved by autograd and checkpointing stay valid.

ComfyUI's blocks are written for sampling: `x += …`, `q.mul_(…)`, `x[:, :n] = …`. Under autograd such a write raises, or
inside a checkpoint changes gradients without an error. Here each write makes a new tensor, which replaces the old one
and its views wherever the code uses them later. Dynamo traces all of it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .torch_functions import (
    AS_STRIDED,
    CUTS,
    DETACH,
    DROPOUTS,
    FACTORIES,
    FACTS,
    IN_PLACE,
    INPLACE_AT,
    OPERATORS_OF_TORCH,
    PLAIN,
    REFUSED,
    UNBIND,
    VISIBLE,
)

# The derivation of a view: a function and its arguments after the base tensor.
Step = tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]


class Place:
    """A tensor from the code's point of view, whichever new tensor holds its values.

    value: the tensor that held them at the last lookup.
    writes_seen: number of writes to its memory that `value` includes.
    memory: index of the memory that it shares with its views.
    base: the place that it is a view of; None for the whole memory.
    step: its derivation from the base; None if unknown.
    cut: index of the call that split it from its base, 0 for none; parts of one split do not overlap.
    """

    def __init__(self, value: Tensor, writes_seen: int, memory: int, base: "Place | None", step: Step | None, cut: int):
        self.value = value
        self.writes_seen = writes_seen
        self.memory = memory
        self.base = base
        self.step = step
        self.cut = cut

    def renew(self, value: Tensor) -> None:
        """Hold the values in this tensor from now on."""
        self.value = value

    def see(self, writes: int) -> None:
        """Note that `value` includes so many writes to its memory."""
        self.writes_seen = writes


class OutOfPlace(TorchFunctionMode):
    """Calls in-place functions out of place, and substitutes the new tensor wherever the old one is used later.

    Views are recorded with their derivation: a write to a view is applied to its base when the base or another view is
    used, and views of a written base are recreated. Tensors from outside count as separate memory.

    block_name: name of the block, for messages.
    hidden: True after code that a compiled run would not follow, since dynamo hides it from every mode: a write such as
        `x[i] = …`, or a read of written memory, such as iteration over it.

    Raises NotImplementedError, with the function and the block, for a write that can't be followed.
    """

    def __init__(self, block_name: str):
        super().__init__()
        self.block_name = block_name
        self.places: dict[Tensor, Place] = {}  # by every tensor that ever represented one; a tensor's hash is its id
        self.writes: list[list[Place]] = []  # of each memory
        self.cuts = 0
        self.eager = not torch.compiler.is_compiling()
        self.has_writes = False
        self.hiding = False  # dynamo hides the current call
        self.renewed: set[int] = set()  # memories of its arguments that new tensors represent now
        # Memories: created here, written in ways that dynamo hides or shows, and used in ways that it hides.
        self.fresh: set[int] = set()
        self.hidden_writes: set[int] = set()
        self.shown_writes: set[int] = set()
        self.hidden_uses: set[int] = set()

    @property
    def hidden(self) -> bool:
        # If dynamo hides every write to memory created in the block, the graph writes it like the code.
        changed = self.hidden_writes - (self.fresh - self.shown_writes)
        return bool(changed or self.hidden_uses & self.shown_writes)

    def __torch_function__(  # noqa: C901 - dynamo traces it at every call of a block
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FACTS:
            return func(*args, **kwargs)
        new_args, new_kwargs = args, kwargs
        if self.has_writes:
            if self.eager:
                self.renewed.clear()
            new_args = tuple([self.current(value, func) for value in args])
            if kwargs:
                new_kwargs = {name: self.current(value, func) for name, value in kwargs.items()}
        self.hiding = False
        if not (self.eager and func in PLAIN):
            if self.eager and not (func in VISIBLE or isinstance(func, OPERATORS_OF_TORCH)):
                self.hiding = True
                self.hidden_uses |= self.renewed
            if func in IN_PLACE:
                return self._write_in_place(func, args, kwargs, new_args, new_kwargs)
            if func in INPLACE_AT:
                position = INPLACE_AT[func]
                if new_kwargs.get("inplace") or (len(new_args) > position and new_args[position]):
                    new_args, new_kwargs = new_args[:position], {**new_kwargs, "inplace": False}
                    return self._write(args[0] if args else kwargs["input"], func(*new_args, **new_kwargs))
            if func in DROPOUTS and _drops_nothing(func, new_args, new_kwargs):
                # Dynamo makes another tensor of it, up to torch 2.11.
                return new_args[0] if new_args else new_kwargs["input"]
            self._refuse_writing(func)
        if "out" in new_kwargs and new_kwargs["out"] is not None:
            out = kwargs["out"]
            if not isinstance(out, Tensor):
                raise NotImplementedError(f"{self.block_name} calls {func.__name__} with several tensors as out.")
            return self._write(
                out, func(*new_args, **{name: value for name, value in new_kwargs.items() if name != "out"})
            )
        if func is Tensor.unflatten:  # a method of Python, which dynamo can't trace here up to torch 2.11
            func = torch.unflatten
        result = func(*new_args, **new_kwargs)
        if isinstance(result, Tensor):
            if self.eager and func in FACTORIES:
                self.fresh.add(self._place(result).memory)
            if result._base is not None or func in DETACH:
                self._note_view(func, new_args, new_kwargs, result, (func, new_args[1:], new_kwargs), 0)
        elif isinstance(result, tuple | list):
            self._note_parts(func, new_args, new_kwargs, result)
        return result

    def current(self, value: Any, func: Any = None) -> Any:
        """Replace each tensor in a structure of tuples, lists and dicts by its current one."""
        if isinstance(value, Tensor):
            place = self.places.get(value)
            if place is None:
                return value
            tensor = self._read(place, func)
            if self.eager and tensor is not value:
                self.renewed.add(place.memory)
            return tensor
        if type(value) is list:
            return [self.current(inner, func) for inner in value]
        if type(value) is tuple:
            return tuple([self.current(inner, func) for inner in value])
        if type(value) is dict:
            return {name: self.current(inner, func) for name, inner in value.items()}
        return value

    def _refuse_writing(self, func: Any) -> None:
        """Raise for functions that write and have no known out-of-place counterpart."""
        if func in REFUSED:
            raise NotImplementedError(f"{self.block_name} calls {func.__name__}, a write that training can't follow.")
        if self.eager:
            overload = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
            if overload or (isinstance(func, torch._ops.OpOverloadPacket) and func.__name__.endswith("_")):
                raise NotImplementedError(f"{self.block_name} calls {func}, a write that training can't follow.")

    def _read(self, place: Place, func: Any) -> Tensor:
        """Return the values of the place after all writes to its memory."""
        writes = self.writes[place.memory]
        later = writes[place.writes_seen :]
        if later:
            if any([not place.cut or write.cut != place.cut for write in later]):
                is_whole = place.base is None
                place.renew(self._with_writes(place, later, func) if is_whole else self._view(place, func))
                self.places[place.value] = place
            place.see(len(writes))
        return place.value

    def _view(self, place: Place, func: Any) -> Tensor:
        if place.base is None or place.step is None:
            raise self._stale_view_error(func)
        step, args, kwargs = place.step
        return step(self._read(place.base, func), *args, **kwargs)

    def _with_writes(self, whole: Place, writes: list[Place], func: Any) -> Tensor:
        """Return a copy of a memory's values with the written views applied."""
        changed = whole.value.clone()
        for write in writes:
            steps, place = [], write
            while place.base is not None:
                steps.append(place.step)
                place = place.base
            view = changed
            for step in reversed(steps):
                if step is None:
                    raise self._stale_view_error(func)
                view = step[0](view, *step[1], **step[2])
            if view._base is None:  # a copy, since the new tensor has another memory layout
                raise self._stale_view_error(func)
            view.copy_(write.value)
        return changed

    def _stale_view_error(self, func: Any) -> NotImplementedError:
        name = getattr(func, "__name__", "its result")
        return NotImplementedError(
            f"{self.block_name} uses a tensor in {name} after it was written through another view, which training "
            "can't follow."
        )

    def _write_in_place(self, func: Any, args: Any, kwargs: Any, new_args: Any, new_kwargs: Any) -> Tensor | None:
        target = args[0] if args else kwargs["input"]
        twin = IN_PLACE[func]
        if twin is not None:
            return self._write(target, twin(*new_args, **new_kwargs))
        copy = self.current(target, func).clone()
        func(copy, *new_args[1:], **{name: value for name, value in new_kwargs.items() if name != "input"})
        self._write(target, copy)
        return None if func is Tensor.__setitem__ else copy

    def _write(self, target: Tensor, value: Tensor) -> Tensor:
        """Make `value` the content of `target`'s place, cast to its dtype."""
        if value.dtype != target.dtype:
            value = value.to(target.dtype)
        if value.shape != target.shape:
            raise NotImplementedError(
                f"{self.block_name} writes {tuple(value.shape)} into {tuple(target.shape)}, which training can't "
                "follow."
            )
        place = self._place(target)
        self.writes[place.memory].append(place)
        place.renew(value)
        place.see(len(self.writes[place.memory]))
        self.places[value] = place
        self.has_writes = True
        if self.eager:
            (self.hidden_writes if self.hiding else self.shown_writes).add(place.memory)
        return value

    def _place(self, tensor: Tensor) -> Place:
        place = self.places.get(tensor)
        if place is None:
            self.writes.append([])
            place = self.places[tensor] = Place(tensor, 0, len(self.writes) - 1, None, None, 0)
        return place

    def _note_parts(self, func: Any, args: Any, kwargs: Any, parts: Any) -> None:
        """Record the derivation of the views in a tuple or list."""
        self.cuts += 1
        start = 0
        for i, part in enumerate(parts):
            if not isinstance(part, Tensor):
                return
            step: Step | None = None
            if func in UNBIND:
                step = Tensor.select, (_argument(args, kwargs, "dim", UNBIND[func], 0), i), {}
            elif func in CUTS:
                dim = _argument(args, kwargs, "dim", CUTS[func], 0)
                step = Tensor.narrow, (dim, start, part.shape[dim]), {}
                start += part.shape[dim]
            self._note_view(func, args, kwargs, part, step, 0 if step is None else self.cuts)

    def _note_view(self, func: Any, args: Any, kwargs: Any, result: Tensor, step: Step | None, cut: int) -> None:
        """Record a view, unless it is known. step, cut: as in its Place, if its source is among the arguments."""
        base: Tensor | None = args[0] if func in DETACH else result._base
        if base is None or result in self.places:
            return
        if self.eager and base not in self.places and not _reads((*args, *kwargs.values()), base):
            return  # a view of a tensor internal to the operation, as a Linear without gradients returns
        source = args[0] if args and isinstance(args[0], Tensor) else None
        is_view_of_source = source is not None and (base is source or base is source._base)
        if not is_view_of_source or func in DETACH or func in AS_STRIDED:
            step, cut = None, 0
        parent = self._place(base if step is None or source is None else source)
        write_count = len(self.writes[parent.memory])
        self.places[result] = Place(result, write_count, parent.memory, parent, step, cut)
        if self.eager:
            if func not in VISIBLE or (func in UNBIND and _iterates()):
                self.hidden_uses.add(parent.memory)


def _reads(args: Any, base: Tensor) -> bool:
    """Return whether a tensor among the arguments is this one, or a view of it."""
    tensors = [entry for value in args for entry in (value if isinstance(value, list | tuple) else (value,))]
    return any(tensor is base or tensor._base is base for tensor in tensors if isinstance(tensor, Tensor))


def _argument(args: Any, kwargs: Any, name: str, position: int, default: Any) -> Any:
    """Return an argument that is passed by name or by position, or its default."""
    if name in kwargs:
        return kwargs[name]
    return args[position] if len(args) > position else default


def _drops_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    p, training, default = DROPOUTS[func]
    if not _argument(args, kwargs, "training", training, default):
        return True
    return _argument(args, kwargs, "p", p, 0.5) == 0


def _iterates() -> bool:
    """Return whether Python's iteration over a tensor called `unbind`."""
    return sys._getframe(4).f_code is Tensor.__iter__.__code__


_watching: list[set[str]] = []


@contextmanager
def blocks_to_leave_eager() -> Iterator[set[str]]:
    """Collect the names of blocks, uncompiled in this context, whose in-place code a compiled run would not follow."""
    names: set[str] = set()
    _watching.append(names)
    try:
        yield names
    finally:
        _watching.remove(names)


class Named(Protocol):
    """A block with a name, for messages."""

    name: str


def out_of_place(block: Named, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` with its in-place code out of place. The result holds the final tensors.

    Arguments are not written: writes of `function` to them appear in its result only.

    block: compiled code does not read its name, so that equal blocks share one graph.

    Raises NotImplementedError, with the function and the block, for a write that can't be followed.
    """
    mode = OutOfPlace("A compiled block" if torch.compiler.is_compiling() else block.name)
    with mode:
        result = function(*args, **kwargs)
    if not torch.compiler.is_compiling() and mode.hidden:
        for names in _watching:
            names.add(block.name)
    return mode.current(result)

"""Names of the attributes that ComfyUI writes while it samples, by the bytecode of its samplers and a model's classes.

Only such an attribute can hold state of a sample. What a loader or another node has set on a model must stay.
"""

import dis
import inspect
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any, NamedTuple

SAMPLERS = ("comfy.sample", "comfy.samplers", "comfy.sampler_helpers")
MUTATORS = frozenset("add append clear discard extend insert pop popitem remove setdefault update".split())


class Writes(NamedTuple):
    """Names of attributes that code writes, on any object.

    assigned: set or deleted.
    filled: those whose list, dict or set may be changed.
    """

    assigned: frozenset[str]
    filled: frozenset[str]


def written_by_sampling(model: Any) -> Writes:
    """Return the names of attributes that sampling writes.

    Followed by name from the samplers and `forward` through all methods of the classes on the model, and through the
    functions of their modules; constructors and methods that only loaders and other nodes call are left out.
    model: a BaseModel.
    """
    modules = (model, *model.diffusion_model.modules())
    kinds = {type(part) for module in modules for part in (module, *vars(module).values())}
    return _written(frozenset(kind for kind in kinds if not _is_foreign(kind)))


@lru_cache(maxsize=64)
def _written(kinds: frozenset[type]) -> Writes:
    methods: dict[str, list[FunctionType]] = {}
    for owner in {owner for kind in kinds for owner in kind.__mro__ if not _is_foreign(owner)}:
        for name, value in vars(owner).items():
            if name != "__init__":
                methods.setdefault(name, []).extend(_functions(value))
    pending = [*_functions_of_samplers(), *methods.get("forward", ())]
    reached = set(pending)
    assigned: set[str] = set()
    filled: set[str] = set()
    while pending:
        function = pending.pop()
        used, writes = names_and_writes(function.__code__)
        assigned |= writes.assigned
        filled |= writes.filled
        for name in used:
            called = [*methods.get(name, ()), *_functions(function.__globals__.get(name))]
            pending += [function for function in called if function not in reached and not _is_foreign(function)]
            reached.update(called)
    return Writes(frozenset(assigned), frozenset(filled))


def _functions_of_samplers() -> Iterator[FunctionType]:
    for module in map(import_module, SAMPLERS):
        for value in vars(module).values():
            if getattr(value, "__module__", None) == module.__name__:
                parts = {**vars(value), "__init__": None} if isinstance(value, type) else {"": value}
                for part in parts.values():
                    yield from _functions(part)


def _functions(value: Any) -> Iterable[FunctionType]:
    """Return the functions of a class's attribute: a method's, a property's, or those below a decorator."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
    parts = (value.func,) if isinstance(value, cached_property) else parts
    functions = {part for part in parts if isinstance(part, FunctionType)}
    functions |= {inspect.unwrap(function) for function in functions}
    return [function for function in functions if isinstance(function, FunctionType)]


def _is_foreign(part: Any) -> bool:
    """Return whether a class or function is of no model: torch's, Python's, or of the MODEL around it, which loads."""
    module = getattr(part, "__module__", None) or "builtins"
    return module.partition(".")[0] in ("torch", "builtins") or module == "comfy.model_patcher"


@lru_cache(maxsize=4096)
def names_and_writes(code: CodeType) -> tuple[frozenset[str], Writes]:
    """Return the names that a function uses, those inside it included, and the attributes that it writes.

    An item that is set, or a call of one of MUTATORS, changes what stands in that line, and what a local variable in it
    was set to: `cache = self.cache`. Too many names do little harm there, as only lists, dicts and sets are meant.
    """
    used = set(code.co_names)
    assigned: set[str] = set()
    filled: set[str] = set()
    attributes: dict[int, set[str]] = {}  # by line, read
    variables: dict[int, set[str]] = {}  # by line, local, set
    changed: set[str] = set()  # local variables
    instructions = list(dis.get_instructions(code))
    line_of = {n: line for begin, end, line in code.co_lines() for n in range(begin, end, 2)}
    items_set = {
        line_of.get(instruction.offset)
        for instruction in instructions
        if instruction.opname in ("STORE_SUBSCR", "DELETE_SUBSCR")
    }
    for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
        line = line_of.get(instruction.offset) or 0
        is_changed = line in items_set
        if following is not None and following.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            is_changed |= following.argval in MUTATORS
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
            assigned.add(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.setdefault(line, set()).add(instruction.argval)
            if is_changed:
                filled.add(instruction.argval)
        elif instruction.opname.startswith(("STORE_FAST", "STORE_DEREF")):
            variables.setdefault(line, set()).update(names)
        elif instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and is_changed:
            changed.update(names)
    for line, local_names in variables.items():
        if not changed.isdisjoint(local_names):
            filled |= attributes.get(line, set())
    for constant in code.co_consts:
        if inspect.iscode(constant):
            inner_used, inner = names_and_writes(constant)
            used |= inner_used
            assigned |= inner.assigned
            filled |= inner.filled
    return frozenset(used), Writes(frozenset(assigned), frozenset(filled))

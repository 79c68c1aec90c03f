"""Hooks for the entry points of a ComfyUI block: `forward`, and other methods that some models call from outside.

A block is two objects that share one `__dict__`. One is in the model, and each of its methods calls the trainer; the
other, of the block's own class, runs the called method, so that nothing inside a block is hooked.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from types import FunctionType
from typing import Any

from torch import nn

Enter = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]

_ENTER = "_tessera_enter"  # in the `__dict__` of a block


class Running:
    """State of a block for its layers: whether its code is running.

    depth: number of active calls of the block.
    """

    def __init__(self, block: str):
        self.block, self.depth = block, 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1

    def check(self, layer: str) -> None:
        """Raise ValueError for a layer that runs outside its block, so that block swap would not load its weights."""
        if not self.depth:
            raise ValueError(
                f"model can't be trained: its {layer} runs while its block {self.block} does not, so that block swap "
                "could give it the weights of another; choose another model."
            )


def hook_block(core: nn.Module, enter: Enter) -> nn.Module:
    """Redirect all calls of a block's methods to `enter(method, args, kwargs)`. Returns the object that runs them."""
    kind: Any = type(core)
    inner: nn.Module = kind.__new__(kind)
    object.__setattr__(inner, "__dict__", vars(core))
    for name in _methods(kind):
        vars(core).pop(name, None)  # set by other nodes; an explicit forward does not run them
    vars(core)[_ENTER] = enter
    object.__setattr__(core, "__class__", _hooked(kind))
    return inner


def entries_of(kind: type, model: nn.Module) -> list[str]:
    """Return the methods of a block's class that the model's own code may call on its blocks, including `forward`."""
    outside: set[Any] = {type(outer) for outer in model.modules() if not isinstance(outer, kind)}
    called = {name for outer in outside for name in _names(outer)}
    return [name for name in _methods(kind) if name == "forward" or name in called]


@lru_cache(maxsize=256)
def _names(kind: type) -> frozenset[str]:
    """Return the names that a class's functions use, except torch's functions."""
    functions = (value for owner in _owners(kind) for value in vars(owner).values() if isinstance(value, FunctionType))
    return frozenset(name for function in functions for code in _codes(function.__code__) for name in code.co_names)


def _codes(code: Any) -> Iterator[Any]:
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _codes(constant)


def _owners(kind: type) -> list[type]:
    return [owner for owner in kind.__mro__ if issubclass(owner, nn.Module) and not _is_torch_class(owner)]


def _is_torch_class(owner: type) -> bool:
    return owner.__module__.partition(".")[0] == "torch"


@lru_cache(maxsize=256)
def _methods(kind: type) -> dict[str, FunctionType]:
    """Return the methods that a class adds to those of torch's Module, and `forward`."""
    methods: dict[str, FunctionType] = {}
    for owner in _owners(kind):
        for name, value in vars(owner).items():
            is_entry = name == "forward" or not (hasattr(nn.Module, name) or name.startswith("__"))
            if is_entry and isinstance(value, FunctionType) and not inspect.isgeneratorfunction(value):
                methods.setdefault(name, value)
    return methods


@lru_cache(maxsize=256)
def _hooked(kind: type) -> type:
    """Derive the class whose methods call `enter`; cached per class, so that equal blocks stay of one class."""

    def redirect(name: str, method: FunctionType) -> Callable[..., Any]:
        @wraps(method)
        def entered(self: Any, *args: Any, **kwargs: Any) -> Any:
            return vars(self)[_ENTER](name, args, kwargs)

        return entered

    methods = {name: redirect(name, method) for name, method in _methods(kind).items()}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})

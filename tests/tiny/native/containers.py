"""ComfyUI's models as they are since 0.32: each hands its attention q, k and v in containers.

The syntax trees of the modules that are loaded are rewritten, since no such release is at hand, and their functions run
the rewritten code for a time. ComfyUI's own attention opens the containers meanwhile, as its newer `wrap_attn` does.
"""

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import torch

NAMES = ("optimized_attention", "optimized_attention_masked")
BOXED = "_in_a_container"


class Container:
    """A tensor with one owner: the first who takes it."""

    __slots__ = ("tensor",)
    opened = 0

    def __init__(self, tensor: Any):
        self.tensor = tensor

    def take(self) -> Any:
        assert self.tensor is not None, "a container was opened twice"
        tensor, self.tensor = self.tensor, None
        if not torch.compiler.is_compiling():
            Container.opened += 1
        return tensor


def _boxed(value: Any) -> Any:
    return value if isinstance(value, Container) else Container(value)


class _Rewrite(ast.NodeTransformer):
    """Puts q, k and v of each call of attention into containers, and counts the calls."""

    calls = 0

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = getattr(node.func, "id", getattr(node.func, "attr", None))
        if name in NAMES and len(node.args) >= 3 and not any(isinstance(arg, ast.Starred) for arg in node.args[:3]):
            node.args[:3] = [ast.Call(ast.Name(BOXED, ast.Load()), [arg], []) for arg in node.args[:3]]
            self.calls += 1
        return node


def _modules() -> Iterator[ModuleType]:
    import comfy.ldm.modules.attention as core

    folder = Path(core.__file__).parents[1]
    for file in sorted(folder.rglob("*.py")):
        if any(f"{name}(" in file.read_text(encoding="utf-8") for name in NAMES):
            yield importlib.import_module("comfy.ldm." + ".".join(file.relative_to(folder).with_suffix("").parts))


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Every function that a module and its classes define, those behind decorators too."""
    holders = [module, *(kind for kind in vars(module).values() if inspect.isclass(kind))]
    for holder in holders:
        for value in list(vars(holder).values()):
            function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else value
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield function


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _opening(kernel: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(kernel)
    def opened(q: Any, k: Any, v: Any, *args: Any, preferred_attention: Any = None, **kwargs: Any) -> Any:
        tensors = [value.take() if isinstance(value, Container) else value for value in (q, k, v)]
        return kernel(*tensors, *args, **kwargs)

    return opened


@contextmanager
def containers() -> Iterator[int]:
    """Have all of comfy.ldm hand containers to attention. Gives the number of calls that do."""
    import comfy.ldm.modules.attention as core

    rewrite, opened_before = _Rewrite(), Container.opened
    kernels = {id(getattr(core, name)): _opening(getattr(core, name)) for name in NAMES}
    modules = list(_modules())  # before any is changed: one that is imported later would keep a changed kernel
    with ExitStack() as stack:
        for module in modules:
            file = str(module.__file__)
            tree = ast.fix_missing_locations(rewrite.visit(ast.parse(Path(file).read_text(encoding="utf-8"))))
            code_by_place = {
                (code.co_qualname, code.co_firstlineno): code for code in _codes(compile(tree, file, "exec"))
            }
            stack.enter_context(patch.dict(vars(module), {BOXED: _boxed}))
            for function in _functions(module):
                code = function.__code__
                stack.callback(setattr, function, "__code__", code)
                function.__code__ = code_by_place.get(
                    (code.co_qualname, code.co_firstlineno), code
                )  # a dataclass's are not here
            for name, value in list(vars(module).items()):
                if id(value) in kernels:
                    stack.enter_context(patch.dict(vars(module), {name: kernels[id(value)]}))
        yield rewrite.calls
    Container.opened = opened_before

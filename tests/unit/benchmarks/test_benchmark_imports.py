"""The benchmarks reach into the pack by name, also by strings: each name is there."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))


def imported(scope: ast.AST, aliases: dict[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """(module of the pack, name taken from it or empty), of imports, of import_module and of the names bound to it.

    known: names bound around this scope.
    """
    nodes, inner = _own_nodes(scope)
    bound = dict(aliases or {})
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tessera":
            for alias in node.names:
                yield node.module or "", alias.name
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Assign):
            bound |= dict(_pairs(node.targets[0], node.value))
        elif isinstance(node, ast.arg):
            bound.pop(node.arg, None)
        elif (module := _module(node)) is not None:
            yield module, ""
    for node in nodes:
        if isinstance(node, ast.Attribute):
            module = _module(node.value)
            if module is None and isinstance(node.value, ast.Name):
                module = bound.get(node.value.id)
            if module is not None and _is_module(module):
                yield module, node.attr
    for function in inner:
        yield from imported(function, bound)


def _own_nodes(scope: ast.AST) -> tuple[list[ast.AST], list[ast.AST]]:
    """The nodes of a scope, and the functions in it, which are scopes of their own."""
    nodes: list[ast.AST] = []
    inner: list[ast.AST] = []
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner.append(child)
            continue
        nested, functions = _own_nodes(child)
        nodes += [child, *nested]
        inner += functions
    return nodes, inner


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, str]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for element, source in zip(target.elts, value.elts, strict=True):
            yield from _pairs(element, source)
    elif isinstance(target, ast.Name) and (module := _module(value)) is not None:
        yield target.id, module


def _module(node: ast.AST) -> str | None:
    """The module of the pack in import_module("tessera.…"), or in pack("…"), which leaves the first part out."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or not isinstance(node.args[0], ast.Constant):
        return None
    name, function = node.args[0].value, ast.unparse(node.func)
    if function == "import_module" and str(name).startswith("tessera."):
        return name
    return f"tessera.{name}" if function in ("pack", "self.pack") else None


def _is_module(name: str) -> bool:
    parts = name.split(".")[1:]
    return ROOT.joinpath(*parts).with_suffix(".py").is_file()


def missing(module: str, name: str) -> str | None:
    try:
        target = import_module(module)
    except ImportError as error:
        return f"{module}: {error}"
    if not name or hasattr(target, name) or _is_module(f"{module}.{name}"):
        return None
    return f"{module} has no {name}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT / "benchmarks")))
def test_names_that_a_benchmark_takes_from_the_pack_are_there(script: Path) -> None:
    names = set(imported(ast.parse(script.read_text(encoding="utf-8"))))
    assert not list(filter(None, (missing(*entry) for entry in sorted(names))))


def test_names_are_found() -> None:
    names = {entry for script in SCRIPTS for entry in imported(ast.parse(script.read_text(encoding="utf-8")))}
    assert ("tessera.memory.swap.slot_ring", "SlotRing") in names
    assert ("tessera.memory.host.staging", "link_bandwidth") in names
    assert ("tessera.memory.host.page_locked", "host_bytes") in names
    assert missing("tessera.gone", "") and missing("tessera.memory.swap.plan", "gone")


def test_attributes_of_a_trainer_that_benchmarks_use_are_there() -> None:
    from tessera.train.loop.trainer import Trainer

    body = ast.parse((ROOT / "train" / "loop" / "trainer.py").read_text(encoding="utf-8"))
    attributes = {n.attr for n in ast.walk(body) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"}
    used = {
        node.attr
        for script in SCRIPTS
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "trainer"
    }
    assert {"run", "close", "placed", "learner"} <= used
    assert not {name for name in used if name not in attributes and not hasattr(Trainer, name)}

"""No tuple is made to be splatted, and none assigns more than two values: names say what each value is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("nodes", "train", "data", "lora", "compile", "models", "memory", "common", "headless")
MOST_VALUES = 2


def splatted(tree: ast.Module) -> set[tuple[int, str]]:
    """Return (line, name) of each `*name` whose name stands for a tuple written out in this function or module."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    constants = set(tuple_names(tree.body))
    places = set()
    for scope in (tree, *functions):
        names = constants | (set(tuple_names(ast.walk(scope))) if scope is not tree else set())
        places |= {
            (node.lineno, node.value.id)
            for node in ast.walk(scope)
            if isinstance(node, ast.Starred) and isinstance(node.value, ast.Name) and node.value.id in names
        }
    return places


def tuple_names(nodes: Iterator[ast.AST] | list[ast.stmt]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and isinstance(node.value, ast.Tuple):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def long_assignments(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, names) of assignments of a written-out tuple to more than MOST_VALUES names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for target in node.targets:
                if isinstance(target, ast.Tuple | ast.List) and len(target.elts) > MOST_VALUES:
                    yield node.lineno, ast.unparse(target)


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    files = (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def test_tuples_are_not_made_to_be_splatted(trees):
    places = [f"{file}:{line} *{name}" for file, tree in trees.items() for line, name in sorted(splatted(tree))]
    assert not places, "\n".join(places)


def test_values_are_assigned_one_or_two_at_a_time(trees):
    places = [f"{file}:{line} {names}" for file, tree in trees.items() for line, names in long_assignments(tree)]
    assert not places, "\n".join(places)


@pytest.mark.parametrize(
    "text",
    [
        "def f(a, b):\n    pair = a, b\n    g(*pair)",
        "def f(a, b):\n    pair: tuple[int, int] = (a, b)\n    return [*pair]",
        "def f(a, b):\n    pair = (a, b)\n    return lambda: g(*pair)",
        "NAMES = ('a', 'b')\ndef f():\n    return (*NAMES, 'c')",
        "NAMES = ('a', 'b')\nMORE = (*NAMES, 'c')",
    ],
)
def test_splatted_tuples_are_found(text):
    assert splatted(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    ["def f(*args):\n    g(*args)", "def f(a):\n    pair = a, a\ndef g(pair):\n    return (*pair, 1)", "g(*(1, 2))"],
)
def test_other_splats_are_allowed(text):
    assert not splatted(ast.parse(text))


def test_long_assignments_are_found():
    assert list(long_assignments(ast.parse("a, b, c = 1, 2, 3")))
    assert list(long_assignments(ast.parse("A, B, C = NAMES = ('a', 'b', 'c')")))
    assert not list(long_assignments(ast.parse("a, b = 1, 2\na, b, c = f()")))

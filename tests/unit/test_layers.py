"""The house as it is laid out: imports run down the layers only, and in no circle."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("nodes", "train", "compile", "models", "memory")  # each may import what stands behind it
FILES = sorted(file for layer in LAYERS for file in (ROOT / layer).rglob("*.py"))
# ComfyUI's node API and its server.
OF_THE_NODES = {"comfy_api", "comfy_execution", "execution", "folder_paths", "nodes", "server"}


@dataclass(frozen=True)
class Import:
    """module: dotted, from the pack's root where `own`. at_once: when the file that holds it is imported."""

    module: str
    own: bool
    at_once: bool


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path) -> Iterator[Import]:
    package = file.relative_to(ROOT).parent.parts

    def found(node: ast.AST, at_once: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, False, at_once) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and not child.level:
                yield Import(child.module or "", False, at_once)
            elif isinstance(child, ast.ImportFrom):
                start = [*package[: len(package) + 1 - child.level], *(child.module or "").split(".")]
                module = ".".join(part for part in start if part)
                for alias in child.names:
                    inner = f"{module}.{alias.name}" if module else alias.name
                    is_module = (ROOT / Path(*inner.split("."))).with_suffix(".py").exists() or alias.name in LAYERS
                    yield Import(inner if is_module else module, True, at_once)
            else:
                later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                later |= isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
                yield from found(child, at_once and not later)

    return found(ast.parse(file.read_text(encoding="utf-8")), True)


def test_the_imports_of_the_pack_are_found():
    assert len(FILES) > 200
    seen = {
        (name_of(file).partition(".")[0], each.module.partition(".")[0]) for file in FILES for each in imports_of(file)
    }
    assert {("nodes", "train"), ("train", "compile"), ("compile", "models"), ("models", "memory")} <= seen


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_run_down_the_layers(layer):
    below = LAYERS[LAYERS.index(layer) :]
    for file in (file for file in FILES if name_of(file).partition(".")[0] == layer):
        for each in imports_of(file):
            where = f"{file.relative_to(ROOT)} imports {each.module}"
            top = each.module.partition(".")[0]
            if each.own:
                assert top in below, f"{where}, which stands above it"
            else:
                assert top not in (*LAYERS, ROOT.name) or (layer, top) == ("nodes", "nodes"), f"{where}: not relative"
                assert layer == "nodes" or top not in OF_THE_NODES, f"{where}, which only nodes/ may"


def test_no_file_needs_itself_to_be_imported():
    needs = {name_of(file): {each.module for each in imports_of(file) if each.own and each.at_once} for file in FILES}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))

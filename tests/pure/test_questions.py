"""The pages for developers name what is there: each `path/file.py: name` is a definition in that file, read by ast."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"ARCHITECTURE.md": 75, "CONTRIBUTING.md": 30, "models/README.md": 25}  # page → least number of references
REFERENCE = re.compile(r"([\w.-]+(?:/[\w.-]+)*\.(?:py|js)\b)(?:: ([A-Za-z_]\w*(?:\.\w+)*))?")
FOLDER = re.compile(r"`((?:[\w-]+/)+)`")
FAMILIES = [file.parent for file in (ROOT / "models").glob("*/family.py") if file.parent.name != "native"]
FILES_OF_FAMILIES = frozenset(file.name for folder in FAMILIES for file in folder.glob("*.py")) - {"__init__.py"}
EXPORT = re.compile(r"^export (?:async )?(?:function|const|class) (\w+)", re.MULTILINE)


def targets(node: ast.stmt) -> list[str]:
    """Return the names that a statement binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        assigned = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [leaf.id for target in assigned for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]
    return []


def definitions(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """Return the names defined in a body, those of a class's own body as Class.name."""
    names = {f"{prefix}{name}" for node in body for name in targets(node)}
    for node in body:
        if isinstance(node, ast.ClassDef):
            names |= definitions(node.body, f"{prefix}{node.name}.")
    return names


@cache
def names_of(file: Path) -> set[str]:
    text = file.read_text(encoding="utf-8")
    return definitions(ast.parse(text).body) if file.suffix == ".py" else set(EXPORT.findall(text))


def wrong_references(text: str, file_names: frozenset[str] = frozenset()) -> list[str]:
    """Return the references to a file, to a name in it or to a folder that do not exist.

    file_names: names of files that the page may give without their folder.
    """
    wrong = [folder for folder in FOLDER.findall(text) if not (ROOT / folder).is_dir()]
    for path, name in REFERENCE.findall(text):
        exists = (ROOT / path).is_file() or (not name and path in file_names)
        if not exists or (name and name not in names_of(ROOT / path)):
            wrong.append(f"{path}: {name}" if name else path)
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_each_name_of_a_page_is_defined_in_its_file(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(REFERENCE.findall(text)) >= PAGES[page]
    assert wrong_references(text, FILES_OF_FAMILIES) == []


def test_each_file_of_a_family_has_a_row():
    table = (ROOT / "models" / "README.md").read_text(encoding="utf-8").partition("## Each file")[2]
    rows = set(re.findall(r"^\| `([\w.]+)` \|", table.partition("\n## ")[0], re.MULTILINE))
    assert rows == FILES_OF_FAMILIES


def test_thirty_questions_have_an_answer():
    table = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## Questions")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(rows) >= 30
    assert len({question for question, _ in rows}) == len(rows)
    for question, answer in rows:
        assert question.endswith("?")
        assert any(name for _, name in REFERENCE.findall(answer)), question


@pytest.mark.parametrize(
    "wrong",
    [
        "train/loop/trainer.py: Trainer.walk",
        "train/loop/trainer.py: Runner",
        "train/loop/trainer.py: run",  # a method without its class
        "train/running.py: Trainer",
        "train/walk.py",
        "walk/",
        "nodes/web/js/run/run_panel.js: makePane",
    ],
)
def test_a_wrong_name_is_found(wrong):
    right = "`train/loop/trainer.py: Trainer.run` after `nodes/web/js/run/run_panel.js: makePanel`"
    assert wrong_references(right) == []
    assert wrong_references(f"{right} and `{wrong}`") == [wrong]

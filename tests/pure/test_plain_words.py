"""Texts for users do without phrases that only the code's authors understand."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("nodes", "train", "data", "lora", "compile", "models", "memory", "common", "headless")
PAGES = ("docs", "nodes/web")
PHRASES = (
    r"kinds? of blocks?",
    r"like blocks",
    r"(runs?|trains?|falls back to) eager\b",
    r"of the settings of now",
    r"cannot honour",
    r"goes out uncompiled",
    r"as it stands",
    r"in the mean\b",
    r"(is|are) passed over",
    r"\banew\b",
    r"\bmend\b",
    r"\blies (in|at|on|beside)\b",
    r"\bstands? (at|beside|alone|beneath)\b",
    r"\b(is|of) no (plain|number|multiple)\b",
    r"what is there",
    r"takes? the place",
)
UNCLEAR = re.compile("|".join(PHRASES))


def literals(source: str) -> Iterator[str]:
    """The strings of a module that are no docstrings."""
    tree = ast.parse(source)
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.value


def texts() -> Iterator[tuple[str, str]]:
    """Each text that a user may read, with the name of its file."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for text in literals(path.read_text(encoding="utf-8")):
                yield path.name, text
    for path in [ROOT / "README.md", *(page for folder in PAGES for page in sorted((ROOT / folder).rglob("*.md")))]:
        yield path.name, path.read_text(encoding="utf-8")


def test_texts_for_users_speak_none_of_the_codes_own_words():
    matches = [f"{name}: {m[0]}" for name, text in texts() for m in UNCLEAR.finditer(text)]
    assert not matches, matches


@pytest.mark.parametrize("text", ["one graph for each kind of block", "it runs eager", "9 % in the mean"])
def test_the_phrases_are_found(text):
    assert UNCLEAR.search(text)

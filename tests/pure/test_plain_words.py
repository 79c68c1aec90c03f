"""Texts for users, docstrings and comments do without phrases that only the code's authors understand."""

import ast
import io
import re
import tokenize
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


def texts_of(source: str) -> Iterator[str]:
    """The strings of a module, docstrings too, and its comments, those of several lines as one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield " ".join(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)


def texts() -> Iterator[tuple[str, str]]:
    """Each text that a user or a reader of the code sees, with the name of its file."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for text in texts_of(path.read_text(encoding="utf-8")):
                yield path.name, text
    for path in [ROOT / "README.md", *(page for folder in PAGES for page in sorted((ROOT / folder).rglob("*.md")))]:
        yield path.name, path.read_text(encoding="utf-8")


def test_texts_speak_none_of_the_codes_own_words():
    matches = [f"{name}: {m[0]}" for name, text in texts() for m in UNCLEAR.finditer(text)]
    assert not matches, matches


@pytest.mark.parametrize("text", ["one graph for each kind of block", "it runs eager", "9 % in the mean"])
def test_the_phrases_are_found(text):
    assert UNCLEAR.search(text)


def test_docstrings_and_comments_are_read():
    assert list(texts_of('"""Names."""\nx = 1  # anew\n')) == ["Names.", "anew"]

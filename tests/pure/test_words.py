"""Names are nouns of the field, and docstrings and comments are plain English."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("nodes", "train", "data", "lora", "compile", "models", "memory", "common", "headless")
# Function words. The field's own stay out of the list: after, before, down, hidden, left, other, out, shared, to, up.
FUNCTION_WORDS = set(
    """about again against all among an and any as at be been being below between both but by can did do does doing
    during each else every few for from further given had has have having hence here how if in into is it its itself
    just less many more most much no nor not now of off on once one only or others over own same so some such than that
    the their them then there these they this those through thus too under until very was were what when where which
    while who whom whose why will with without""".split()
)
PARTICIPLES = set(
    """added asked begun bought brought built caught chosen come done drawn felt found gone got grown heard held kept
    known laid lain led lent lost made met missed moved named paid seen sent shown sold spent stood taken thought told
    tried turned understood waited walked wanted wished won worn written""".split()
)
PREFIX = re.compile(r"(of|to_which|by_what|what|how|is_lone|so|such|thus)_")  # a function word that begins a name
MOST_BARE = 0.002  # of all names that are bound
FOLDERS = {"product": PACKAGES, "tests": ("tests",), "benchmarks": ("benchmarks",), "tools": ("tools",)}
# A name of a test begins with its subject.
NO_SUBJECT = re.compile(r"test_(it|its|nothing|no|there|what|who|where|when|how|of|in|as|without)_")
PHRASES = {
    "where": r"\bwhere\b",  # a place now and then; mostly it was an `if`
    "lies, lay": r"\b(?:lies|lay|lying)\b(?! out)",
    "stands, stood": r"\b(?:stands|stood|standing)\b",
    "told, tells": r"\b(?:told|tells|telling)\b",
    "what is, what it": r"\bwhat (?:is|it|are|was|they|comes|came|has|had)\b",
    "anew, mend": r"\b(?:anew|mends?)\b",
}
MOST_PHRASES = 0.2  # of each kind in 1,000 words


def files(folders: tuple[str, ...] = PACKAGES) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def names_of(folders: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return each bound name of the folders with its place."""
    return tuple(
        (name, f"{path.relative_to(ROOT)}:{line}")
        for path in files(folders)
        for name, line in bound_names(ast.parse(path.read_text(encoding="utf-8")))
    )


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every (name, line) that a module binds: functions, classes, parameters, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno


def is_bare(name: str) -> bool:
    """Return whether a name is a function word or a lone participle, or begins with a function word."""
    name = "" if name.startswith("__") else name.strip("_")
    return name in FUNCTION_WORDS | PARTICIPLES or bool(PREFIX.match(name))


def prose(source: str) -> str:
    """Join a module's docstrings and comments."""
    texts = [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join([*texts, *(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)])


@cache
def texts() -> tuple[str, ...]:
    """Return the prose of each file."""
    return tuple(prose(path.read_text(encoding="utf-8")) for path in files())


@pytest.mark.parametrize("room", FOLDERS)
def test_names_are_nouns_of_the_field(room):
    names = names_of(FOLDERS[room])
    bare = [f"{place} {name}" for name, place in names if is_bare(name)]
    assert len(bare) < MOST_BARE * len(names), "\n".join(bare)


def test_names_of_tests_begin_with_their_subject():
    assert [f"{place} {name}" for name, place in names_of(("tests",)) if NO_SUBJECT.match(name)] == []


@pytest.mark.parametrize("kind", PHRASES)
def test_docstrings_and_comments_are_plain(kind):
    counts = Counter(match[0].lower() for text in texts() for match in re.finditer(PHRASES[kind], text, re.I | re.M))
    assert counts.total() <= MOST_PHRASES * sum(len(text.split()) for text in texts()) / 1000, counts


@pytest.mark.parametrize("name", ["of", "_told", "of_forms", "is_lone_share"])
def test_bare_names_are_recognised(name):
    assert is_bare(name)
    assert not any(map(is_bare, ("offset", "kept_rows", "hidden", "is_last", "until_step")))


def test_phrases_are_found_in_docstrings_and_comments():
    text = prose('"""Names, where it is known."""\nx = 1  # which lies there\n')
    assert [kind for kind, pattern in PHRASES.items() if re.search(pattern, text, re.I)] == list(PHRASES)[:2]

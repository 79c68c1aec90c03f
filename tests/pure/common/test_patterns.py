"""Regular expressions of the pack: each takes time linear in its input, whatever a stranger writes."""

import ast
import re
import time
from pathlib import Path

import pytest

try:
    from re import _constants as sre
    from re import _parser as sre_parse
except ImportError:  # before Python 3.11
    import sre_constants as sre
    import sre_parse

ROOT = Path(__file__).parents[3]
PACKAGES = ("nodes", "train", "data", "lora", "compile", "models", "memory", "common", "headless")
FUNCTIONS = {"compile", "match", "search", "fullmatch", "sub", "subn", "findall", "finditer", "split"}
LENGTH = 1 << 11  # characters
MEASURABLE = 0.003  # seconds of CPU
LONGER = 4  # times; a quadratic pattern takes 16 times as long
MOST = 8  # times as long, where linear takes 4


def constants(tree: ast.Module) -> dict[str, str]:
    """Texts of a module's names, f-strings of known names included."""
    strings: dict[str, str] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        values = node.value.elts if isinstance(node.value, ast.Tuple) and len(names) > 1 else [node.value]
        for name, value in zip(names, values, strict=False):
            if isinstance(name, ast.Name) and (text := text_of(value, strings)) is not None:
                strings[name.id] = text
    return strings


def text_of(node: ast.expr, strings: dict[str, str]) -> str | None:
    """Text of a pattern; what is only known when it runs, such as an escaped name, counts as the letter a."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return strings.get(node.id)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else strings.get(getattr(part.value, "id", ""), "a")
            for part in node.values
        )
    return None


def methods_of(tree: ast.Module) -> dict[str, set[str]]:
    """Methods that a module calls on each of its names, as on a compiled pattern."""
    methods: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in FUNCTIONS:
            methods.setdefault(node.value.id, set()).add(node.attr)
    return methods


def tables(tree: ast.Module) -> dict[str, list[str]]:
    """Patterns of tables whose rows begin with one, by the loop variable that takes them."""
    rows = {
        (node.target if isinstance(node, ast.AnnAssign) else node.targets[0]).id: node.value
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Tuple)
        if isinstance(node.target if isinstance(node, ast.AnnAssign) else node.targets[0], ast.Name)
    }
    texts_by_name: dict[str, list[str]] = {}
    for loop in ast.walk(tree):
        if isinstance(loop, (ast.For, ast.comprehension)) and isinstance(loop.iter, ast.Name) and loop.iter.id in rows:
            first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
            firsts = (row.elts[0] for row in rows[loop.iter.id].elts if isinstance(row, ast.Tuple))
            texts_found = [text for row in firsts if (text := text_of(row, {})) is not None]
            texts_by_name.setdefault(ast.unparse(first), []).extend(texts_found)
    return texts_by_name


def patterns() -> list[tuple[str, str, int, bool]]:
    """List every pattern that the pack gives to `re`: place, text, flags, and whether it may begin anywhere."""
    entries = []
    for file in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        strings, methods = constants(tree), methods_of(tree)
        names = {
            node.value: node.targets[0].id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "re"
                and node.func.attr in FUNCTIONS
                and node.args
            ):
                flags = re.DOTALL if "DOTALL" in ast.unparse(node) else 0
                text = text_of(node.args[0], strings)
                used = methods.get(names.get(node, ""), {"search"}) if node.func.attr == "compile" else {node.func.attr}
                place = f"{file.relative_to(ROOT)}:{node.lineno}"
                for expression in [text] if text is not None else tables(tree).get(ast.unparse(node.args[0]), []):
                    entries.append((place, expression, flags, not used <= {"match", "fullmatch"}))
    return entries


def letters(parsed, depth: int = 0) -> set[str]:
    """Characters that a parsed pattern names, and one of each class that it names."""
    characters: set[str] = set()
    classes = {
        sre.CATEGORY_DIGIT: "0",
        sre.CATEGORY_SPACE: " \n",
        sre.CATEGORY_WORD: "a",
        sre.CATEGORY_NOT_SPACE: "a/",
        sre.CATEGORY_NOT_WORD: "/",
        sre.CATEGORY_NOT_DIGIT: "a",
    }
    for op, value in parsed:
        if op in (sre.LITERAL, sre.NOT_LITERAL):
            characters.add(chr(value))
        elif op is sre.RANGE:
            characters.add(chr(value[0]))
        elif op is sre.CATEGORY:
            characters |= set(classes.get(value, "a"))
        elif op is sre.ANY:
            characters |= set("a\n")
        elif isinstance(value, (list, tuple, sre_parse.SubPattern)):
            for inner in nested(value):
                characters |= letters(inner, depth + 1)
    return characters


def nested(value):
    """Yield the parsed patterns, and lists of a class, inside a value of one."""
    if isinstance(value, sre_parse.SubPattern):
        yield value
    elif isinstance(value, list) and value and all(isinstance(item, tuple) and len(item) == 2 for item in value):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from nested(item)


def words(pattern: str) -> set[str]:
    """Texts whose repetition may be hard: the pattern's characters, pairs of them, and its literal runs."""
    alphabet = sorted(letters(sre_parse.parse(pattern)))[:7]
    runs = re.findall(r"[A-Za-z_]{2,}", re.sub(r"\\[a-zA-Z]|\(\?P?<\w+>", " ", pattern))[:3]
    heads = [re.sub(r"\\(.)", r"\1", head) for head in re.findall(r"^(?:[\w '.:-]|\\[^a-zA-Z])+", pattern)]
    return {*alphabet, *(a + b for a in alphabet for b in alphabet if a < b), *runs, *heads}


def seconds(compiled: re.Pattern[str], text: str, anywhere: bool) -> float:
    """CPU seconds of the fastest of three searches of all matches, or of matches of the whole text."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        if anywhere:
            for _ in compiled.finditer(text):
                pass
        compiled.fullmatch(text)
        best = min(best, time.process_time() - start)
        if best < MEASURABLE or best > 0.5:
            break
    return best


def texts(pattern: str, length: int):
    heads = ["", *(re.sub(r"\\(.)", r"\1", head) for head in re.findall(r"^(?:[\w '.:-]|\\[^a-zA-Z])+", pattern))]
    for word in words(pattern):
        for head in dict.fromkeys(heads):
            yield head + word * (length // len(word)) + "\0"


def slow_text(pattern: str, flags: int, anywhere: bool) -> str | None:
    """Beginning of a text on which the time of a pattern grows faster than its length; None without one.

    A quadratic pattern takes millions of steps for LENGTH characters, hundreds of times what a linear one takes.
    """
    compiled = re.compile(pattern, flags)
    for short, text in zip(texts(pattern, LENGTH // LONGER), texts(pattern, LENGTH), strict=True):
        long = seconds(compiled, text, anywhere)
        if long > MEASURABLE and long > MOST * seconds(compiled, short, anywhere):
            return text[:40]
    return None


@pytest.mark.parametrize(("place", "pattern", "flags", "anywhere"), patterns())
def test_pattern_takes_linear_time(place, pattern, flags, anywhere):
    assert slow_text(pattern, flags, anywhere) is None, f"{place}: {pattern!r} takes more than linear time"


@pytest.mark.parametrize("pattern", [r"\w\. \w|(\S+\s+){11}\S", r".*.*=.*", r"(a+)+b", r"a*a*b"])
def test_slow_patterns_are_found(pattern):
    if pattern == r"(a+)+b":  # exponential: a shorter text shows it
        compiled = re.compile(pattern)
        assert seconds(compiled, "a" * 20 + "\0", True) > 4 * seconds(compiled, "a" * 17 + "\0", True)
        return
    assert slow_text(pattern, 0, True) is not None

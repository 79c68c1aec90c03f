"""Each field of a dataclass or named tuple is documented on a line of its own in the docstring: `name: …`.

A line for a name that is no field is left over from one.
The only field of a class may be documented by the class's sentence. Fields of a base class are documented there; a
subclass may say more of them.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("nodes", "train", "data", "lora", "compile", "models", "memory", "common", "headless")
RECORDS = ("NamedTuple", "TypedDict")
# A line that begins with a name and a colon, or with several names.
ENTRY = re.compile(r"(`?\w+`?(?:(?:, | and | or )`?\w+`?)*): \S")


def records(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Yield the dataclasses, named tuples and typed dicts of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            decorators = [item.func if isinstance(item, ast.Call) else item for item in node.decorator_list]
            is_dataclass = any(last_name(item) == "dataclass" for item in decorators)
            if is_dataclass or any(last_name(base) in RECORDS for base in node.bases):
                yield node


def last_name(expression: ast.expr) -> str:
    return ast.unparse(expression).rpartition(".")[2]


def fields_of(record: ast.ClassDef) -> list[str]:
    """List the fields that a class adds to those of its bases."""
    return [
        statement.target.id
        for statement in record.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if last_name(statement.annotation) != "KW_ONLY" and "ClassVar" not in ast.unparse(statement.annotation)
    ]


def entries(record: ast.ClassDef) -> list[list[str]]:
    """List the names that begin each line of the docstring, for lines that document names."""
    matches = (ENTRY.match(line) for line in (ast.get_docstring(record) or "").splitlines())
    return [re.findall(r"\w+", re.sub(" and | or ", ", ", match[1])) for match in matches if match]


def faults(record: ast.ClassDef) -> Iterator[str]:
    """Yield what a class lacks, in words."""
    names, lines = fields_of(record), entries(record)
    if names and not ast.get_docstring(record):
        yield "no docstring"
    elif len(names) > 1:
        yield from (f"no line for {name}" for name in names if [name] not in lines)
    if all(last_name(base) in RECORDS for base in record.bases):  # others inherit fields
        yield from (f"no field {name}" for line in lines for name in line if name.islower() and name not in names)
    yield from (f"several lines for {name}" for name in names if sum(line == [name] for line in lines) > 1)
    yield from (f"one line for {', '.join(line)}" for line in lines if len(line) > 1 and set(line) & set(names))


@pytest.fixture(scope="module")
def product_records() -> list[tuple[str, ast.ClassDef]]:
    files = (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))
    return [
        (f"{file.relative_to(ROOT).as_posix()}:{record.lineno} {record.name}", record)
        for file in files
        for record in records(ast.parse(file.read_text(encoding="utf-8")))
    ]


def test_fields_are_documented_one_to_a_line(product_records):
    assert len(product_records) > 250
    wrong = [f"{place}: {fault}" for place, record in product_records for fault in faults(record)]
    assert not wrong, "\n".join(wrong)


DATACLASS = '@dataclass(frozen=True)\nclass A:\n    """{}"""\n    left: int\n    right: int = 0\n'


def faults_in(source: str) -> list[str]:
    return [fault for record in records(ast.parse(source)) for fault in faults(record)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Pair.", ["no line for left", "no line for right"]),
        ("Pair.\n\n    left: inches.", ["no line for right"]),
        ("Pair. left: inches.\n\n    right: inches.", ["no line for left"]),
        ("left: inches; right: inches.", ["no line for right"]),
        ("Pair.\n\n    left: inches,\n        right: inches.", ["no line for right"]),
        ("Pair.\n\n    left, right: inches.", ["no line for left", "no line for right", "one line for left, right"]),
        (
            "Pair.\n\n    `left` and `right`: inches.",
            ["no line for left", "no line for right", "one line for left, right"],
        ),
        ("Pair.\n\n    left: inches.\n    left: feet.\n    right: inches.", ["several lines for left"]),
        ("Pair.\n\n    left: inches.\n    right: inches.\n    top: inches.", ["no field top"]),
        ("", ["no docstring"]),
    ],
)
def test_fields_without_a_line_are_found(text, expected):
    assert faults_in(DATACLASS.format(text)) == expected


@pytest.mark.parametrize(
    "head",
    [
        "@dataclass\nclass A:",
        "@dataclasses.dataclass()\nclass A:",
        "class A(NamedTuple):",
        "class A(typing.TypedDict):",
    ],
)
def test_records_of_every_form_are_found(head):
    assert faults_in(f'{head}\n    """Pair."""\n    left: int\n    right: int\n') == [
        "no line for left",
        "no line for right",
    ]


@pytest.mark.parametrize(
    "source",
    [
        DATACLASS.format("Pair.\n\n    left: inches.\n    right: inches, unless\n        left is 0.\n    "),
        DATACLASS.format("left: inches.\n    right: inches.\n\n    Raises: nothing.\n    "),
        '@dataclass\nclass A:\n    """Width in inches."""\n    width: int\n',
        '@dataclass\nclass A:\n    """Pair."""\n    on_host: ClassVar[int] = 0\n    _: KW_ONLY\n',
        '@dataclass\nclass A(B):\n    """Pair. left: feet."""\n',
        "class A:\n    left: int\n    right: int\n",
    ],
)
def test_fields_with_a_line_and_other_classes_pass(source):
    assert not faults_in(source)

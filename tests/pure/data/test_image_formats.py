"""Pillow tries every decoder it has unless it is told which, and one of them starts a program."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACK = ("nodes", "train", "data", "lora", "compile", "models", "memory", "common")


def opens(path: Path) -> list[ast.Call]:
    """The calls of `Image.open` in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call for call in calls if ast.unparse(call.func).endswith("Image.open")]


def test_every_image_is_opened_by_the_decoders_of_formats_that_are_named():
    calls_by_file = {path: opens(path) for top in PACK for path in sorted((ROOT / top).rglob("*.py"))}
    assert sum(map(len, calls_by_file.values())) >= 3
    open_to_all = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path, calls in calls_by_file.items()
        for call in calls
        if "formats" not in {keyword.arg for keyword in call.keywords}
    ]
    assert not open_to_all, open_to_all

"""The tests of the native path that a newer ComfyUI leaves out are those that are written for the pinned one."""

import re
from pathlib import Path

import pytest
from newer_comfyui import OLDEST_ONLY, is_newer

NATIVE = Path(__file__).resolve().parents[1] / "comfy" / "models" / "native"
# What stands for a newer ComfyUI, or compares with the classes of the pinned one.
PINNED = re.compile(
    r"^from tiny\.native(\.containers|\.rows import (qwen_image21|ltx25)| import containers)|model_table", re.MULTILINE
)


def test_files_that_play_or_pin_a_comfyui_are_left_out_with_a_newer_one():
    files = {path.name for path in NATIVE.rglob("test_*.py") if PINNED.search(path.read_text(encoding="utf-8"))}
    assert files == set(OLDEST_ONLY)


@pytest.mark.parametrize(
    ("version", "newer"), [("0.30.0", False), ("0.30.1", True), ("0.46.0", True), ("1.0", True), ("0.9.12", False)]
)
def test_a_version_is_newer_by_its_numbers(version, newer, tmp_path):
    (tmp_path / "comfyui_version.py").write_text(f'# written by a tool\n__version__ = "{version}"\n')
    assert is_newer(tmp_path, "0.30.0") is newer

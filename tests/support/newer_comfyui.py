"""Tests that hold for the ComfyUI that the pack is tested with and would fail on every newer one."""

import re
from pathlib import Path

# Files of tests/comfy/models/native and its folders, each with what of it is written for that ComfyUI alone.
OLDEST_ONLY = {
    "test_containers.py": "its models hand attention containers by themselves",
    "test_models_page.py": "docs/models.md lists the classes of the pinned ComfyUI",
    "test_ltx25.py": "it has what the tests' own class adds",
    "test_qwen_image21.py": "it has the class that the tests' own stands for",
}


def version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version as ComfyUI writes it, such as 0.30.0 or v0.33.1."""
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def is_newer(comfyui: Path, oldest: str) -> bool:
    """Return whether the ComfyUI in this folder is newer than the version `oldest`."""
    match = re.search(r"__version__ = \"(.+?)\"", (comfyui / "comfyui_version.py").read_text(encoding="utf-8"))
    assert match is not None, comfyui
    return version(match[1]) > version(oldest)

"""Leaves out, with a newer ComfyUI, what holds for the pinned one only."""

from pathlib import Path

import pytest
from newer_comfyui import OLDEST_ONLY, is_newer
from tessera_dev import OLDEST, find_comfyui


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not is_newer(find_comfyui(), OLDEST.version):
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and (reason := OLDEST_ONLY.get(item.path.name)):
            item.add_marker(pytest.mark.skip(reason=f"not with a newer ComfyUI: {reason}"))

"""These tests run without torch and without ComfyUI, in seconds: what they import may load neither."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def neither_torch_nor_comfyui(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fail where a test of this folder loaded torch or ComfyUI. In one process with tests that need them nothing can be
    told, which is why dev.py runs this folder in a process of its own."""
    yield
    if not pytestconfig.pluginmanager.has_plugin("with_comfyui"):
        loaded = " and ".join(sorted({"torch", "comfy"} & sys.modules.keys()))
        assert not loaded, f"A test of tests/pure loaded {loaded}; `python -X importtime` shows what imports it."

"""Fixtures that run a real ComfyUI server."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from comfy_server import ComfyServer


def make_server(base: Path) -> ComfyServer:
    """A server over `base`, not started yet, with the tiny models in place."""
    if not (base / "models" / "vae").exists():
        tiny.write_models(base / "models")
    comfyui = sys.modules["tessera_dev"].find_comfyui()
    return ComfyServer(base, comfyui, cpu=not torch.cuda.is_available(), env={"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A running ComfyUI with the tiny models; its folders are `server.base / "input"` and so on."""
    with make_server(tmp_path_factory.mktemp("comfyui")) as running:
        yield running


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ComfyServer]:
    """A server of the test's own, not started, for tests that kill it."""
    server = make_server(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def tiny_loaders() -> dict[str, dict[str, Any]]:
    """API nodes `model`, `clip` and `vae` that load the tiny files."""
    return {
        "model": {
            "class_type": "UNETLoader",
            "inputs": {"unet_name": "tiny_flux.safetensors", "weight_dtype": "default"},
        },
        "clip": {
            "class_type": "TesseraTinyClipLoader",
            "inputs": {"clip_name1": "tiny_clip_l.safetensors", "clip_name2": "tiny_t5xxl.safetensors"},
        },
        "vae": {"class_type": "VAELoader", "inputs": {"vae_name": "tiny_vae.safetensors"}},
    }

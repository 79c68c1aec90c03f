"""One process of `dev.py card`. Its parent sends a case a line, as JSON, and gets one JSON line back.

A reply holds the case's `state` and `text`, and where there are `figures` for later cases, a `row` of the page's table
and `details` below it. With `spoiled` the process is not to be used any more.
"""

import json
import os
import platform
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)

from processes import take_over_stdout  # noqa: E402

from card.page import FAILED, OK  # noqa: E402

ROOT = HERE.parents[1]
# What a CUDA device that failed says to whatever comes after.
BROKEN = ("CUDA error", "CUDA driver error", "unspecified launch failure", "illegal memory access")


def main() -> None:
    spec = json.loads(sys.argv[1])
    reply = take_over_stdout()
    if spec["kind"] == "facts":
        reply(facts(spec["device"]))
        return
    run = import_module(f"card.{spec['kind']}").start(spec)
    reply({"ready": True})
    for line in sys.stdin:
        reply(attempt(run, json.loads(line)))


def attempt(run: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Run one case. It fails where it says so, or by an error, which is told with its place in the pack."""
    try:
        return {"state": OK, **run(asked["how"], asked["before"])}
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        import torch

        text = str(error)
        spoiled = isinstance(error, torch.OutOfMemoryError) or any(words in text for words in BROKEN)
        return {"state": FAILED, "text": said(error), "spoiled": spoiled}


def said(error: Exception) -> str:
    """The error's name, its place and first line, without folders of this machine."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if str(ROOT) in f.filename and str(HERE) not in f.filename] or list(frames)
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    first = (str(error).strip().splitlines() or [""])[0][:300]
    for folder in (str(ROOT), str(Path.home())):
        first = first.replace(folder, "…")
    return f"{type(error).__name__} at {where}: {first}"


def facts(device: str) -> dict[str, Any]:
    """Facts of the machine. card: empty where there is no CUDA device and one was asked for."""
    import psutil
    import torch

    ram = psutil.virtual_memory()
    found = {
        "card": "cpu" if device == "cpu" else "",
        "memory_gib": 0.0,
        "torch": torch.__version__,
        "triton": "",
        "comfyui": comfyui_version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "ram_gib": ram.total / 2**30,
        "ram_free_gib": ram.available / 2**30,
    }
    try:
        found["triton"] = import_module("triton").__version__
    except ImportError:
        pass
    if device == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"card": properties.name, "memory_gib": properties.total_memory / 2**30}
        found["capability"] = f"{properties.major}.{properties.minor}"
    return found


def comfyui_version() -> str:
    file = Path(os.environ["COMFYUI_PATH"]) / "comfyui_version.py"
    words = file.read_text(encoding="utf-8").split('"') if file.is_file() else []
    return words[-2] if len(words) > 2 else "?"


if __name__ == "__main__":
    main()

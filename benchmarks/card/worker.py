"""One process of `dev.py card`. Its parent sends a case a line, as JSON, and gets one JSON line back.

A reply holds the case's `state` and `text`, and optionally `figures` for later cases, a `row` of the page's table and
`details` below it. After a reply with `spoiled` the process must not be used any more.
"""

import json
import os
import platform
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from processes import take_over_stdout

from card.page import FAILED, OK

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Errors of every later call after a CUDA device has failed.
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


def attempt(run: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Run one case. It fails by its state, or by an error, which is reported with its place in the pack."""
    try:
        return {"state": OK, **run(command["how"], command["before"])}
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        import torch

        text = str(error)
        spoiled = isinstance(error, torch.OutOfMemoryError) or any(words in text for words in BROKEN)
        return {"state": FAILED, "text": describe(error), "spoiled": spoiled}


def describe(error: Exception) -> str:
    """Return the error's name, its place and first line, without folders of this machine."""
    frames = traceback.extract_tb(error.__traceback__)
    frames_of_pack = [f for f in frames if str(ROOT) in f.filename and str(HERE) not in f.filename] or list(frames)
    place = f"{Path(frames_of_pack[-1].filename).name}:{frames_of_pack[-1].lineno}" if frames_of_pack else "?"
    first = (str(error).strip().splitlines() or [""])[0][:300]
    for folder in (str(ROOT), str(Path.home())):
        first = first.replace(folder, "…")
    return f"{type(error).__name__} at {place}: {first}"


def facts(device: str) -> dict[str, Any]:
    """Return facts of the machine. card: empty if a CUDA device was requested and there is none."""
    import psutil
    import torch

    ram = psutil.virtual_memory()
    machine = {
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
        machine["triton"] = import_module("triton").__version__
    except ImportError:
        pass
    if device == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        machine |= {"card": properties.name, "memory_gib": properties.total_memory / 2**30}
        machine["capability"] = f"{properties.major}.{properties.minor}"
    return machine


def comfyui_version() -> str:
    file = Path(os.environ["COMFYUI_PATH"]) / "comfyui_version.py"
    words = file.read_text(encoding="utf-8").split('"') if file.is_file() else []
    return words[-2] if len(words) > 2 else "?"


if __name__ == "__main__":
    main()

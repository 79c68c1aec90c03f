"""ComfyUI: where it is, and its start without a server that listens."""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import NoDevice, UsageError

RUN = Path(os.path.abspath(__file__)).parents[1] / "run.py"  # not resolved: the pack may be linked into custom_nodes


def find_comfyui() -> Path:
    """Return ComfyUI's folder. Raises UsageError where there is none."""
    beside = RUN.parents[2]
    named = os.environ.get("COMFYUI_PATH")
    folder = Path(named) if named else beside
    if (folder / "main.py").is_file() and (folder / "comfy").is_dir():
        return folder
    if named:
        raise UsageError(f"COMFYUI_PATH is {named}, which isn't a ComfyUI folder; give the folder with main.py.")
    raise UsageError(
        f"{beside} isn't a ComfyUI folder; put this pack into ComfyUI's custom_nodes, or set COMFYUI_PATH to its "
        "folder."
    )


def set_environment(args: Any) -> None:
    """Set what ComfyUI's main.py sets before torch is loaded, where it is started itself."""
    os.environ.update(HF_HUB_DISABLE_TELEMETRY="1", DO_NOT_TRACK="1", TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL="1")
    if args.default_device is not None:
        rest = [device for device in range(32) if device != args.default_device]
        see_devices(",".join(map(str, [args.default_device, *rest])))
    if args.cuda_device is not None:
        see_devices(str(args.cuda_device))
    if args.oneapi_device_selector is not None:
        os.environ["ONEAPI_DEVICE_SELECTOR"] = args.oneapi_device_selector
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def see_devices(devices: str) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        os.environ[name] = devices


def start_comfyui(folder: Path, options: Sequence[str]) -> Any:
    """Start ComfyUI as its main.py does, with all custom nodes, but do not listen. Returns its server.

    Its modules are imported by name, as they are there; SystemExit is raised for an option that it does not know.
    """
    sys.argv = [str(folder / "main.py"), *options]
    sys.path[0] = str(folder)  # in place of this pack's own folder, which ComfyUI's loader imports as a package
    importlib.import_module("comfy.options").enable_args_parsing()
    set_environment(importlib.import_module("comfy.cli_args").args)
    try:
        main = importlib.import_module("main")
    except (AssertionError, RuntimeError) as error:  # of torch, which ComfyUI asks for its device while it is loaded
        if any(word in str(error) for word in ("CUDA", "NVIDIA", "HIP")) and not device_count():
            raise NoDevice from error
        raise
    _, server, _ = main.start_comfyui()
    return server


def device_count() -> int:
    """Return how many GPUs torch sees. Loads torch."""
    return int(importlib.import_module("torch").cuda.device_count())

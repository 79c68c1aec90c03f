"""Location of ComfyUI, and its start without a listening server."""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import NoDevice, UsageError

RUN = Path(os.path.abspath(__file__)).parents[1] / "run.py"  # not resolved: the pack may be linked into custom_nodes


def find_comfyui() -> Path:
    """Return ComfyUI's folder. Raises UsageError if there is none."""
    default_folder = RUN.parents[2]
    configured_path = os.environ.get("COMFYUI_PATH")
    folder = Path(configured_path) if configured_path else default_folder
    if (folder / "main.py").is_file() and (folder / "comfy").is_dir():
        return folder
    if configured_path:
        raise UsageError(
            f"COMFYUI_PATH is {configured_path}, which isn't a ComfyUI folder; give the folder with main.py."
        )
    raise UsageError(
        f"{default_folder} isn't a ComfyUI folder; put this pack into ComfyUI's custom_nodes, or set COMFYUI_PATH to "
        "its folder."
    )


def set_environment(args: Any) -> None:
    """Set the environment as ComfyUI's main.py does before torch is loaded, when run as a script."""
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

    Its modules are imported by name, as in main.py. Raises SystemExit for an option unknown to it.
    """
    sys.argv[:] = [str(folder / "main.py"), *options]
    sys.path[0] = str(folder)  # replaces this pack's own folder, which ComfyUI's loader imports as a package
    importlib.import_module("comfy.options").enable_args_parsing()
    set_environment(importlib.import_module("comfy.cli_args").args)
    try:
        main = importlib.import_module("main")
    except (AssertionError, RuntimeError) as error:  # from torch, which ComfyUI queries for its device on import
        if any(word in str(error) for word in ("CUDA", "NVIDIA", "HIP")) and not device_count():
            raise NoDevice from error
        raise
    _, server, _ = main.start_comfyui()
    return server


def device_count() -> int:
    """Return the number of GPUs that torch sees. Imports torch."""
    return int(importlib.import_module("torch").cuda.device_count())

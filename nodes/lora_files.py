"""LoRA files that a workflow may name: those of ComfyUI's LoRA folders, which hold no code."""

from collections.abc import Mapping
from pathlib import Path

import folder_paths
from torch import Tensor

from ..train.lora_source import LoraSource

NONE = "none"
_ENDINGS = (".safetensors", ".sft")


def lora_files() -> list[str]:
    """The names that a combo offers; pickled files are left out."""
    return [name for name in folder_paths.get_filename_list("loras") if name.lower().endswith(_ENDINGS)]


def lora_source(told: str, name: str, connected: Mapping[str, Tensor] | None = None) -> LoraSource | None:
    """The LoRA of this name, or the one that is connected; None where there is none. told: the input, for messages.

    Raises ValueError for a name that is not on the list, both at once, and a file that is not whole.
    """
    if connected is not None:
        if name != NONE:
            raise ValueError(
                f"{told} is {name!r} and a LORA_MODEL is connected too; set {told} to none, or disconnect it."
            )
        return LoraSource.of_model(connected)
    if name == NONE:
        return None
    return LoraSource.of_file(_path(told, name), told)


def lora_file_fingerprint(*names: str | None) -> object:
    """Changes with the files of these names."""
    if None in names:  # linked: not known yet, so taken as changed
        return float("nan")
    found = []
    for name in names:
        if name != NONE and name in lora_files():
            stat = _path("", name).stat()
            found.append((name, stat.st_size, stat.st_mtime_ns))
    return found


def _path(told: str, name: str) -> Path:
    path = folder_paths.get_full_path("loras", name) if name in lora_files() else None
    if path is None:
        raise ValueError(
            f"{told}: there is no LoRA {name!r} in ComfyUI's LoRA folders; choose one of the list, or put it there as "
            "safetensors."
        )
    return Path(path)

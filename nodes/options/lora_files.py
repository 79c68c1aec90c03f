"""LoRA files that a workflow may name: those of ComfyUI's LoRA folders, which hold no code."""

from collections.abc import Mapping
from pathlib import Path

import folder_paths
from torch import Tensor

from ...lora.options import NONE, SAME
from ...lora.source import LoraSource

_ENDINGS = (".safetensors", ".sft")


def lora_files() -> list[str]:
    """The names that a combo offers; pickled files are left out."""
    return [name for name in folder_paths.get_filename_list("loras") if name.lower().endswith(_ENDINGS)]


def lora_source(
    told: str, name: str, connected: Mapping[str, Tensor] | None = None, unset: str = NONE
) -> LoraSource | None:
    """The LoRA of this name, or the one that is connected; None where there is none. told: the input, for messages.
    unset: what it has to be where one is connected.

    Raises ValueError for a name that is not on the list, both at once, and a file that is not whole.
    """
    if connected is not None:
        if name != unset:
            raise ValueError(
                f"{told} is {name!r} and a LORA_MODEL is connected too; set {told} to {unset}, or disconnect it."
            )
        return LoraSource.of_model(connected, told)
    if name == NONE:
        return None
    return LoraSource.of_file(_path(told, name), told)


def low_noise_source(told: str, name: str, connected: Mapping[str, Tensor] | None = None) -> LoraSource | str:
    """The LoRA of Wan 2.2's low noise expert likewise; SAME and NONE stay what they are."""
    if connected is None and name == SAME:
        return SAME
    return lora_source(told, name, connected, unset=SAME) or NONE


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

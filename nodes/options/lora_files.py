"""LoRA files that a workflow may name: safetensors in ComfyUI's LoRA folders."""

from collections.abc import Mapping
from pathlib import Path

import folder_paths
from torch import Tensor

from ...lora.options import NONE, SAME
from ...lora.source import LoraSource

_ENDINGS = (".safetensors", ".sft")


def lora_files() -> list[str]:
    """List the names for a combo; pickled files are excluded."""
    return [name for name in folder_paths.get_filename_list("loras") if name.lower().endswith(_ENDINGS)]


def lora_source(
    input_name: str, name: str, connected: Mapping[str, Tensor] | None = None, unset: str = NONE
) -> LoraSource | None:
    """Open the LoRA of this name, or the connected one; None if there is neither.

    input_name: for messages.
    unset: value that `name` must have if a LoRA is connected.

    Raises ValueError for an unlisted name, for both at once, and for a truncated file.
    """
    if connected is not None:
        if name != unset:
            raise ValueError(
                f"{input_name} is {name!r} and a LORA_MODEL is connected too; set {input_name} to {unset}, or "
                "disconnect it."
            )
        return LoraSource.from_lora(connected, input_name)
    if name == NONE:
        return None
    return LoraSource.from_file(lora_path(input_name, name), input_name)


def low_noise_source(input_name: str, name: str, connected: Mapping[str, Tensor] | None = None) -> LoraSource | str:
    """Open the low noise expert's LoRA; SAME and NONE are passed through."""
    if connected is None and name == SAME:
        return SAME
    return lora_source(input_name, name, connected, unset=SAME) or NONE


def lora_file_fingerprint(*names: str | None) -> object:
    """Return a fingerprint that changes with the files of these names."""
    if None in names:  # linked, value unknown: count as changed
        return float("nan")
    states = []
    for name in names:
        if name != NONE and name in lora_files():
            stat = lora_path("", name).stat()
            states.append((name, stat.st_size, stat.st_mtime_ns))
    return states


def lora_path(input_name: str, name: str) -> Path:
    """Return the file of a listed LoRA. Raises ValueError for any other name."""
    path = folder_paths.get_full_path("loras", name) if name in lora_files() else None
    if path is None:
        raise ValueError(
            f"{input_name}: there is no LoRA {name!r} in ComfyUI's LoRA folders; choose one of the list, or put it "
            "there as safetensors."
        )
    return Path(path)

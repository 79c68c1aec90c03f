"""Opening of untrusted safetensors files: regular files with a header of bounded size."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .budgets import METADATA, Budget, OverBudget, check_size
from .json_text import parse_json
from .regular_files import open_regular

_HEADER = 8  # bytes at the start of a file that give the size of its header, little-endian


def open_tensors(path: Path | str) -> Any:
    """Open a safetensors file to read, as a context manager.

    Raises OSError if it is no regular file, SafetensorError if it is damaged or its header exceeds any real one.
    """
    with open_regular(Path(path)) as file:
        size = int.from_bytes(file.read(_HEADER), "little")
    try:
        check_size(METADATA, Path(path).name, bytes=size)
    except OverBudget as error:  # in another kind of file these bytes mean anything
        raise SafetensorError(str(error)) from error
    return safe_open(path, framework="pt")


def metadata_field(metadata: dict[str, str] | None, name: str, budget: Budget = METADATA) -> Any:
    """Parse a JSON field of a file's metadata. Raises KeyError without it, ValueError as `parse_json`."""
    return parse_json((metadata or {})[name], budget, name)

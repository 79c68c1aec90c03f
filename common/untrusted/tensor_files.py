"""Opening of safetensors files that strangers may have written: regular files with a header of bounded size."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .budgets import METADATA, Budget, OverBudget, check_size
from .json_text import parse_json
from .regular_files import open_regular

_HEADER = 8  # bytes at the start of a file that give the size of its header, little-endian


def open_tensors(path: Path | str) -> Any:
    """Open a safetensors file to read, as a context.

    Raises OSError for what is no regular file, OverBudget for a larger header than any real file has, SafetensorError
    for a damaged file.
    """
    with open_regular(Path(path)) as file:
        size = int.from_bytes(file.read(_HEADER), "little")
    try:
        check_size(METADATA, Path(path).name, bytes=size)
    except OverBudget as error:  # of a file of another kind these are any bytes
        raise SafetensorError(str(error)) from error
    return safe_open(path, framework="pt")


def metadata_field(metadata: dict[str, str] | None, name: str, budget: Budget = METADATA) -> Any:
    """Parse a JSON field of a file's metadata. Raises KeyError without it, ValueError as `parse_json`."""
    return parse_json((metadata or {})[name], budget, name)

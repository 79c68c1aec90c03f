"""The safetensors header of a LoRA file: hashes and format-dependent keys, without file system paths."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, uint8

from ...common.untrusted.budgets import METADATA
from ...common.untrusted.json_text import parse_json

_ABSOLUTE = re.compile(r"(/|~|\\|[A-Za-z]:[/\\]|file:)", re.IGNORECASE)
# Paths inside text: in quotes, as a value, or as a word. A word may begin with a slash only if another slash follows:
# "and/or", "5 /6" and web addresses stay as they are.
_START = r"file:/|~[/\\]|[A-Za-z]:[/\\]|\\{2,}(?=\w)"
_VALUE, _WORD = rf"(?:{_START}|/(?=\w))", rf"(?:{_START}|/(?=[^\s/\\]+/))"
_INSIDE = re.compile(
    rf"""(?<=["'`]){_VALUE}[^"'`\n]*|(?<==){_VALUE}[^"'`,;\n]*|(?<![\w.:/\\~<]){_WORD}[^\s"'`,;)\]}}]*""",
    re.IGNORECASE,
)


def for_file(metadata: Mapping[str, str], tensors: Mapping[str, Tensor], format: str) -> dict[str, str]:
    """Adapt metadata to the file of these tensors in this format: set its hashes and names, remove paths."""
    header = {str(key): without_paths(str(value)) for key, value in metadata.items()}
    if "modelspec.sai_model_spec" in header:
        digest = tensor_hash(tensors)
        header["modelspec.hash_sha256"] = f"0x{digest}"
        header["sshs_model_hash"] = digest
        if format == "diffusers":
            header["modelspec.implementation"] = "diffusers"
        if format != "kohya":
            header.pop("ss_network_module", None)
            header.pop("ss_network_args", None)
    return header


def tensor_hash(tensors: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 of the bytes after the header in a safetensors file of these tensors, as hexadecimal digits.

    safetensors sorts by dtype, widest first, then by name; our files don't mix two dtypes of one width.
    """
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(uint8).numpy().data)
    return digest.hexdigest()


def last_part(text: str) -> str:
    """Return the name at the end of a path."""
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1]


def without_paths(value: Any) -> Any:
    """Return the value as plain JSON, with every absolute path cut to its last part, also inside text."""
    if isinstance(value, str):
        return _text_without_paths(value)
    if isinstance(value, Mapping):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _text_without_paths(text: str) -> str:
    if text.startswith("data:"):  # a thumbnail, whose encoding may look like a path
        return text
    if "/" not in text and "\\" not in text:
        return text
    if text.startswith(("{", "[")):
        try:
            read = parse_json(text, METADATA, "metadata")
        except ValueError:
            pass
        else:
            clean = without_paths(read)
            return text if clean == read else json.dumps(clean, ensure_ascii=False)
    if _ABSOLUTE.match(text.strip()):
        return last_part(text)
    return _INSIDE.sub(lambda match: last_part(match[0]), text)

"""The safetensors header of a LoRA file: hashes, format-dependent keys, and no path of a disk."""

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
# Inside of text: in quotes, as a value, or as a word, which a slash alone begins where another follows: "and/or", "5
# /6" and addresses of the web stay as they are.
_START = r"file:/|~[/\\]|[A-Za-z]:[/\\]|\\{2,}(?=\w)"
_VALUE, _WORD = rf"(?:{_START}|/(?=\w))", rf"(?:{_START}|/(?=[^\s/\\]+/))"
_INSIDE = re.compile(
    rf"""(?<=["'`]){_VALUE}[^"'`\n]*|(?<==){_VALUE}[^"'`,;\n]*|(?<![\w.:/\\~<]){_WORD}[^\s"'`,;)\]}}]*""",
    re.IGNORECASE,
)


def for_file(metadata: Mapping[str, str], tensors: Mapping[str, Tensor], format: str) -> dict[str, str]:
    """Fit metadata to the file of these tensors in this format: its hashes, the names that it uses, no paths."""
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
    """SHA-256 of the bytes that follow the header in a safetensors file of these tensors, as hexadecimal digits.

    safetensors sorts by dtype, widest first, then by name; two dtypes of one width don't meet in our files.
    """
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(uint8).numpy().data)
    return digest.hexdigest()


def last_part(text: str) -> str:
    """The name at the end of a path."""
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1]


def without_paths(value: Any) -> Any:
    """The value as plain JSON, with every absolute path cut to its last part, also inside of text."""
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
    if text.startswith("data:"):  # a thumbnail, whose letters may read as a path
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
    return _INSIDE.sub(lambda found: last_part(found[0]), text)

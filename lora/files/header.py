"""The safetensors header of a LoRA file: hashes and format-dependent keys, without file system paths; the alphas that
diffusers writes into it."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, uint8

from ...common.untrusted.budgets import METADATA
from ...common.untrusted.json_text import parse_json
from .spellings import ALPHA, DOWN, split_key

PEFT_FIELD = "lora_adapter_metadata"
"""Field with PEFT's LoraConfig of each component, written by diffusers. Its files have no `alpha` tensors: diffusers
takes alpha from here, and ComfyUI takes the rank."""
_MOST_ALPHA = 1e6

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


def with_header_alphas(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[dict[str, Tensor], int]:
    """Add the `alpha` tensors of a file whose header holds them. Also returns the number of modules whose update they
    change.

    delta W is alpha / r · up @ down, with `use_rslora` alpha / √r (`peft.tuners.lora.LoraLayer.update_layer`). Modules
    with an alpha of their own keep it, as does a file whose header can't be read.
    """
    config = _peft_config(metadata)
    result, changed = dict(tensors), 0
    if not config:
        return result, changed
    components = {key.partition(".")[0] for key in config}
    for key, down in tensors.items():
        module, _, suffix = split_key(key)
        component, _, name = module.partition(".")
        if suffix != DOWN or component not in components or f"{module}.{ALPHA}" in tensors or not down.numel():
            continue
        alpha = _alpha(config, component, name, len(down))
        if alpha is not None and alpha != len(down):
            result[f"{module}.{ALPHA}"] = torch.tensor(alpha)
            changed += 1
    return result, changed


def _peft_config(metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        config = parse_json(metadata.get(PEFT_FIELD, ""), METADATA, PEFT_FIELD)
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def _alpha(config: Mapping[str, Any], component: str, name: str, rank: int) -> float | None:
    """Return the alpha of a module, as if it were divided by the rank; None if the header has none."""
    alpha = config.get(f"{component}.lora_alpha")
    patterns = config.get(f"{component}.alpha_pattern")
    if isinstance(patterns, dict):
        # PEFT takes the keys for regular expressions; those of strangers are compared as ends of names.
        parts = name.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        alpha = next((patterns[end] for end in ends if end in patterns), alpha)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= _MOST_ALPHA:
        return None
    return float(alpha) * (math.sqrt(rank) if config.get(f"{component}.use_rslora") is True else 1.0)

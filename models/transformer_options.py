"""The options dict that ComfyUI passes down to every block, without the entries that change from call to call.

No guard on it is filtered out: a patch or an attention override added later takes effect. Entries that nobody reads are
removed before the call, since adding, removing or changing them would recompile.
"""

import uuid
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Set by ComfyUI's sampling and by its models for patches to read; blocks themselves read none of it.
VOLATILE = frozenset(
    {
        "activations_shape",
        "block",
        "block_index",
        "block_type",
        "callbacks",
        "cond_or_uncond",
        "img_slice",
        "multigpu_clones",
        "multigpu_thread_pool",
        "original_shape",
        "sample_sigmas",
        "sigmas",
        "total_blocks",
        "transformer_index",
        "uuids",
        "wrappers",
    }
)

# Those of them that the outer forward of some models reads: SeedVR2, and HunyuanVideo's mean flow.
READ_OUTSIDE_BLOCKS = frozenset({"cond_or_uncond", "sample_sigmas", "sigmas"})

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor, torch.dtype, torch.device, uuid.UUID)


def carries_code(options: Mapping[str, Any]) -> bool:
    """Return whether an entry may run inside a block: a patch, an override, an object of another node."""
    return any(key not in VOLATILE and not _is_plain(value) for key, value in options.items())


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(inner) for inner in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(inner) for inner in value)
    return isinstance(value, _PLAIN)


def steady(options: dict[str, Any], drop: frozenset[str] = VOLATILE) -> dict[str, Any]:
    """Return the options for a compiled call: all of them if code is attached, since it may read any, else those that
    are not dropped."""
    if carries_code(options):
        return options
    return {key: value for key, value in options.items() if key not in drop}

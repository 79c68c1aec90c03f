"""Weights of a GGUF file as training holds them.

A Linear stays in the file's blocks and is dequantised at each use. A LoRA on the MODEL cannot be merged into blocks, as
most formats have no quantiser, so its two factors are kept and their product is added to the dequantised weight.
All else is held dequantised: weights of other layers, LoRAs of other kinds, formats that `gguf_blocks` does not read.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import comfy.lora
import torch
from comfy.weight_adapter.lora import LoRAAdapter
from torch import Tensor, nn

from ....common.gguf_tensor import as_stored, block_type, plain_values, type_name, value_shape
from .gguf_blocks import NAMES, dequantize_blocks
from .stored_format import Format

Patches = Sequence[tuple[Any, ...]]  # (strength, patch, strength of the model, offset, function), as core lists them
FACTORS = ("up", "down")


def check_type(weight: Tensor) -> None:
    """Raise ValueError for a weight in an unsupported format."""
    number = block_type(weight)
    if number is None or number in NAMES or _package_reads(number):
        return
    name = type_name(weight)
    fix = "load a file in another, such as Q8_0 or Q4_K_S"
    if _package() is None:
        raise ValueError(f"model holds weights in GGUF's {name}, which the package gguf reads; install it, or {fix}.")
    raise ValueError(
        f"model holds weights in GGUF's {name}, which neither Tessera nor the installed package gguf reads; update "
        f"gguf, or {fix}."
    )


def _package() -> Any:
    """Return the package gguf, which any loader of such files installs; None if it is missing."""
    try:
        return import_module("gguf")
    except ImportError:
        return None


@functools.cache
def _package_reads(number: int) -> bool:
    """Return True if the package gguf is installed and dequantises this format."""
    gguf = _package()
    if gguf is None:
        return False
    try:
        kind = gguf.GGMLQuantizationType(number)
        _, size = gguf.GGML_QUANT_SIZES[kind]
        gguf.quants.dequantize(torch.zeros(1, size, dtype=torch.uint8).numpy(), kind)
    except (ValueError, KeyError, NotImplementedError):
        return False
    return True


def values_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of a weight: a plain one in its own dtype over the same memory, others dequantised to `dtype`.

    Raises ValueError as `check_type` does.
    """
    check_type(weight)
    number = block_type(weight)
    if number is None:
        return plain_values(weight)
    stored, shape = as_stored(weight), value_shape(weight)
    if number in NAMES:
        return dequantize_blocks(stored, NAMES[number], shape, dtype)
    gguf = _package()
    values = gguf.quants.dequantize(stored.cpu().numpy(), gguf.GGMLQuantizationType(number))
    return torch.from_numpy(values).reshape(shape).to(stored.device, dtype)


def with_weight_patches(values: Tensor, patches: Patches, key: str, device: torch.device) -> Tensor:
    """Return the values in fp32 on `device` with ComfyUI's weight patches applied."""
    return comfy.lora.calculate_weight(patches, values.to(device, torch.float32, copy=True), key)


def format_beside(weight: Tensor, patches: Patches, dtype: torch.dtype) -> Format | None:
    """Describe a Linear's weight as stored, with the factors of its LoRAs if it has any.

    None if it has to be held dequantised, in `dtype`: in a format that `gguf_blocks` does not read, with patches other
    than plain LoRAs, or with LoRAs so large that dequantised it takes no more memory.
    """
    number, shape = block_type(weight), value_shape(weight)
    if number not in NAMES or len(shape) != 2:
        return None
    ranks = [_rank(patch, shape) for patch in patches]
    rank = sum(rank or 0 for rank in ranks)
    beside = rank * sum(shape) * dtype.itemsize
    if None in ranks or as_stored(weight).nbytes + beside >= shape[0] * shape[1] * dtype.itemsize:
        return None
    constants: dict[str, bool | int | float | str | None] = {"rank": rank} if rank else {}
    return Format(NAMES[number], (shape[0], shape[1]), FACTORS if rank else (), constants)


def _rank(patch: tuple[Any, ...], shape: tuple[int, ...]) -> int | None:
    """Return the rank of a patch that adds the product of two factors, None for other patches."""
    _, content, strength_model, offset, function = patch
    if not isinstance(content, LoRAAdapter) or strength_model != 1 or function is not None:
        return None
    up, down, _, mid, dora_scale, reshape = content.weights
    if mid is not None or dora_scale is not None or reshape is not None:
        return None
    part = list(shape)
    if offset is not None:
        part[offset[0]] = offset[2]
    fits = [up.shape[0], down[0].numel()] == part and up[0].numel() == down.shape[0]
    return down.shape[0] if fits else None


def factors_of(patches: Patches, stored: Format, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return up (out, rank) and down (rank, in), whose product is the sum of patches that `format_beside` accepts."""
    (rows, columns), rank = stored.shape, int(stored.constants.get("rank") or 0)
    if not rank:
        return ()
    up, down = (torch.zeros(size, device=device) for size in ((rows, rank), (rank, columns)))
    end = 0
    for strength, content, _, offset, _ in patches:
        own_up, own_down, alpha = content.weights[:3]
        start, end = end, end + len(own_down)
        axis, first, length = (0, 0, rows) if offset is None else offset
        region = [slice(None), slice(None)]
        region[axis] = slice(first, first + length)
        scale = strength * (1.0 if alpha is None else float(alpha) / len(own_down))
        up[region[0], start:end] = own_up.to(device, torch.float32).flatten(1) * scale
        down[start:end, region[1]] = own_down.to(device, torch.float32).flatten(1)
    return up.to(dtype), down.to(dtype)


def held_in_full_notes(
    model: nn.Module, patches: Mapping[str, Patches], dtype: torch.dtype, prefix: str = "diffusion_model."
) -> list[str]:
    """Return a sentence for each reason for which weights of a GGUF file are held dequantised while the model trains.

    patches: the MODEL's weight patches. prefix: of the model's names in their keys.
    """
    bytes_by_reason: dict[str, int] = {}
    for name, module in model.named_modules():
        for attribute, weight in module._parameters.items():
            if block_type(weight) is None:
                continue
            weight_patches = patches.get(f"{prefix}{name}.{attribute}", ())
            if isinstance(module, nn.Linear) and format_beside(weight, weight_patches, dtype) is not None:
                continue
            plain = isinstance(module, nn.Linear) and format_beside(weight, (), dtype) is not None
            reason = "under a LoRA that is large or of another kind" if plain else f"as {type_name(weight)}"
            bytes_by_reason[reason] = bytes_by_reason.get(reason, 0) + math.prod(value_shape(weight)) * dtype.itemsize
    return [
        f"Weights that the GGUF file holds {reason} are converted to {str(dtype)[6:]} while it trains "
        f"({size / 2**30:.2f} GiB); all others stay as they are."
        for reason, size in sorted(bytes_by_reason.items())
    ]

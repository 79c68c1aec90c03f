"""Tiny models whose blocks' matrices are stored in fewer bits, as ComfyUI's loaders read them from a file."""

import json
from typing import Any

import torch
from torch import Tensor

from ..models.flux import QUANTISED, quantise_layer
from .reference import plain_model
from .row import NativeRow, build

PLAIN = "plain fp8"  # every weight without a scale, as a loader's weight_dtype gives it


def build_stored(row: NativeRow, kind_name: str) -> Any:
    """Make the row's MODEL with the block Linears stored as `kind_name`: PLAIN or one of QUANTISED."""
    if kind_name == PLAIN:
        return build(row, torch.float8_e4m3fn)
    return build(row, quantised=_quantised(build(row).model.diffusion_model, kind_name))


def dequantised_model(row: NativeRow, kind_name: str) -> Any:
    """Make the BaseModel of `plain_model` with the weights of `build_stored` in fp32, as ComfyUI dequantises them."""
    from comfy.quant_ops import QuantizedTensor

    stored = build_stored(row, kind_name).model.diffusion_model
    model = plain_model(build(row))
    with torch.no_grad():
        for name, weight in stored.named_parameters():
            wide = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
            model.diffusion_model.get_parameter(name).copy_(wide)
    return model


def _quantised(model: torch.nn.Module, kind_name: str) -> dict[str, Tensor]:
    """Return the weights as a file holds them: quantised block Linears and all others."""
    from tessera.models.blocks import find_blocks
    from tessera.models.native.forward.shadow import is_linear

    file = dict(model.state_dict())
    inside = tuple(f"{block.name}." for block in find_blocks(model))
    # Turned weights are cut into groups, which a width has to be a multiple of; others stay whole, as in files.
    group = QUANTISED[kind_name][1].get("convrot_groupsize", 1)
    linears = {name: module for name, module in model.named_modules() if is_linear(module) and name.startswith(inside)}
    names = [name for name, linear in linears.items() if linear.in_features % group == 0]
    for number, name in enumerate(names):
        stored, described = quantise_layer(file.pop(f"{name}.weight"), kind_name, number)
        file |= {f"{name}{suffix}": tensor for suffix, tensor in stored.items()}
        file[f"{name}.comfy_quant"] = torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)
    return file

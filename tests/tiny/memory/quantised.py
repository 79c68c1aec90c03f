"""One quantised layer, as ComfyUI reads it and as training holds it."""

import json
from typing import Any

import torch
from torch import Tensor

from ..models.flux import quantise_layer

LAYER = "block.0.layer"


def core_layer(kind_name: str, weight: Tensor, bias: Tensor) -> Any:
    """A MODEL that consists of one Linear (out, in), read by ComfyUI's own from a file of `kind_name`."""
    from comfy.model_patcher import ModelPatcher
    from comfy.ops import mixed_precision_ops

    stored, described = quantise_layer(weight, kind_name)
    conf = torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)
    # Formats that the device cannot multiply in, as `comfy.ops.pick_operations` has it on a CPU.
    disabled = {"nvfp4", "mxfp8", "float8_e4m3fn"}
    linear = mixed_precision_ops({}, weight.dtype, disabled=disabled).Linear(*weight.shape[::-1], dtype=weight.dtype)
    model = torch.nn.Module()
    model.diffusion_model = torch.nn.Module()
    model.diffusion_model.block = torch.nn.ModuleList([torch.nn.Module()])
    model.diffusion_model.block[0].layer = linear
    file = {name: tensor for name, tensor in stored.items()} | {".bias": bias, ".comfy_quant": conf}
    model.load_state_dict({f"diffusion_model.{LAYER}{name}": tensor for name, tensor in file.items()}, strict=False)
    return ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def stored_layer(
    kind_name: str, weight: Tensor, bias: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Any, Tensor]:
    """(the FrozenLinear of such a layer for a run in `dtype`, the weight that ComfyUI takes it for, in fp32)"""
    from tessera.memory.weights.frozen import FrozenWeights

    model = core_layer(kind_name, weight, bias)
    frozen = FrozenWeights(model, torch.device("cpu"), dtype).linear(LAYER)
    return frozen, model.model.get_submodule(f"diffusion_model.{LAYER}").weight.to(torch.float32).dequantize()

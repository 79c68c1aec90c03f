"""The layers that a LoRA can train, by their weights: Linears, and in a U-Net its convolutions too."""

from math import prod
from typing import Any, TypeGuard

from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import nn

from ..memory.weights.check_format import has_known_forward
from .blocks import linear_shapes

WeightShape = tuple[int, ...]


def convolutions(diffusion_model: nn.Module) -> dict[str, nn.Conv2d]:
    """Return the convolutions of a U-Net by module name, except grouped ones and those with other padding than zeros;
    none for another model.

    A low-rank update is two convolutions in a row only if every output sees every input.
    """
    if not isinstance(diffusion_model, UNetModel):
        return {}
    return {name: module for name, module in diffusion_model.named_modules() if _is_plain(module)}


def _is_plain(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    if not isinstance(module, nn.Conv2d) or not has_known_forward(module):
        return False
    return module.groups == 1 and module.padding_mode == "zeros"


def weight_shapes(model: Any) -> dict[str, WeightShape]:
    """Return the weight shape of every layer that a LoRA can train, by module name, without reading a weight: (out, in)
    of a Linear, (out, in, height, width) of a convolution."""
    linears, convs = linear_shapes(model), convolutions(model.diffusion_model)
    if not convs:
        return dict(linears)
    shapes: dict[str, WeightShape] = {}
    for name, _ in model.diffusion_model.named_modules():
        if name in linears:
            shapes[name] = linears[name]
        elif name in convs:
            conv = convs[name]
            shapes[name] = conv.out_channels, conv.in_channels, *conv.kernel_size
    return shapes


def layer_shapes(model: Any) -> dict[str, tuple[int, int]]:
    """Return (out, in) of each layer of `weight_shapes` as a matrix; the inputs of a convolution are
    in·height·width."""
    return {name: as_matrix(shape) for name, shape in weight_shapes(model).items()}


def as_matrix(shape: WeightShape) -> tuple[int, int]:
    """Return (out, in·height·width) of a weight."""
    return shape[0], prod(shape[1:])

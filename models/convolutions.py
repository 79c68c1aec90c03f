"""The layers that a LoRA can train, by their weights: Linears, and in a U-Net its convolutions too."""

from math import prod
from typing import Any, TypeGuard

from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import nn

from ..memory.weights.reading import has_known_forward
from .blocks import linear_shapes

WeightShape = tuple[int, ...]


def convolutions(diffusion_model: nn.Module) -> dict[str, nn.Conv2d]:
    """The convolutions of a U-Net by module name, those of groups or with other padding than zeros left out; none of
    another model.

    An update of low rank is two convolutions in a row only where every output sees every input.
    """
    if not isinstance(diffusion_model, UNetModel):
        return {}
    return {name: module for name, module in diffusion_model.named_modules() if _is_plain(module)}


def _is_plain(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    if not isinstance(module, nn.Conv2d) or not has_known_forward(module):
        return False
    return module.groups == 1 and module.padding_mode == "zeros"


def weight_shapes(model: Any) -> dict[str, WeightShape]:
    """The shape of the weight of every layer that a LoRA can train, by module name, without reading a weight: (out, in)
    of a Linear, (out, in, height, width) of a convolution."""
    linears, convs = linear_shapes(model), convolutions(model.diffusion_model)
    if not convs:
        return dict(linears)
    found: dict[str, WeightShape] = {}
    for name, _ in model.diffusion_model.named_modules():
        if name in linears:
            found[name] = linears[name]
        elif name in convs:
            conv = convs[name]
            found[name] = conv.out_channels, conv.in_channels, *conv.kernel_size
    return found


def layer_shapes(model: Any) -> dict[str, tuple[int, int]]:
    """(out, in) of the matrix that the weight of each layer of `weight_shapes` is, with in·height·width of a
    convolution as its inputs."""
    return {name: as_matrix(shape) for name, shape in weight_shapes(model).items()}


def as_matrix(shape: WeightShape) -> tuple[int, int]:
    """(out, in·height·width) of a weight."""
    return shape[0], prod(shape[1:])

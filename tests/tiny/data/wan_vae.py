"""A tiny Wan 2.1 VAE with random weights, which Qwen-Image uses too: 16 channels, 8 x 8 pixels and 4 frames a cell."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from ..models.weights import Shapes, fill

CHANNELS = 16
LEVELS = (1, 2, 4, 4)  # fixed in ComfyUI, as are two residual blocks a level; only the width is read from the weights
TIME_LEVELS = (False, True, True)  # which halvings of the picture halve the frames as well


def _conv(shapes: Shapes, name: str, inputs: int, outputs: int, *kernel: int) -> None:
    shapes[f"{name}.weight"] = (outputs, inputs, *kernel)
    shapes[f"{name}.bias"] = (outputs,)


def _res_block(shapes: Shapes, name: str, inputs: int, outputs: int) -> None:
    shapes[f"{name}.residual.0.gamma"] = (inputs, 1, 1, 1)
    _conv(shapes, f"{name}.residual.2", inputs, outputs, 3, 3, 3)
    shapes[f"{name}.residual.3.gamma"] = (outputs, 1, 1, 1)
    _conv(shapes, f"{name}.residual.6", outputs, outputs, 3, 3, 3)
    if inputs != outputs:
        _conv(shapes, f"{name}.shortcut", inputs, outputs, 1, 1, 1)


def _middle(shapes: Shapes, name: str, width: int) -> None:
    _res_block(shapes, f"{name}.0", width, width)
    shapes[f"{name}.1.norm.gamma"] = (width, 1, 1)
    _conv(shapes, f"{name}.1.to_qkv", width, 3 * width, 1, 1)
    _conv(shapes, f"{name}.1.proj", width, width, 1, 1)
    _res_block(shapes, f"{name}.2", width, width)


def _head(shapes: Shapes, name: str, width: int, outputs: int) -> None:
    shapes[f"{name}.0.gamma"] = (width, 1, 1, 1)
    _conv(shapes, f"{name}.2", width, outputs, 3, 3, 3)


def _encoder(shapes: Shapes, width: int) -> None:
    _conv(shapes, "encoder.conv1", 3, width, 3, 3, 3)
    index, inputs = 0, width
    for level, multiple in enumerate(LEVELS):
        outputs = multiple * width
        for _ in range(2):
            _res_block(shapes, f"encoder.downsamples.{index}", inputs, outputs)
            index, inputs = index + 1, outputs
        if level < len(LEVELS) - 1:
            _conv(shapes, f"encoder.downsamples.{index}.resample.1", outputs, outputs, 3, 3)
            if TIME_LEVELS[level]:
                _conv(shapes, f"encoder.downsamples.{index}.time_conv", outputs, outputs, 3, 1, 1)
            index += 1
    _middle(shapes, "encoder.middle", inputs)
    _head(shapes, "encoder.head", inputs, 2 * CHANNELS)


def _decoder(shapes: Shapes, width: int) -> None:
    inputs = LEVELS[-1] * width
    _conv(shapes, "decoder.conv1", CHANNELS, inputs, 3, 3, 3)
    _middle(shapes, "decoder.middle", inputs)
    index = 0
    for level, multiple in enumerate(reversed(LEVELS)):
        outputs = multiple * width
        for _ in range(3):
            _res_block(shapes, f"decoder.upsamples.{index}", inputs, outputs)
            index, inputs = index + 1, outputs
        if level < len(LEVELS) - 1:
            _conv(shapes, f"decoder.upsamples.{index}.resample.1", outputs, outputs // 2, 3, 3)
            if TIME_LEVELS[::-1][level]:
                _conv(shapes, f"decoder.upsamples.{index}.time_conv", outputs, 2 * outputs, 3, 1, 1)
            index, inputs = index + 1, outputs // 2
    _head(shapes, "decoder.head", inputs, 3)


def wan_vae_shapes(width: int) -> Shapes:
    """Names and shapes of the VAE's parameters; the real `width` is 96."""
    shapes: Shapes = {}
    _encoder(shapes, width)
    _conv(shapes, "conv1", 2 * CHANNELS, 2 * CHANNELS, 1, 1, 1)
    _conv(shapes, "conv2", CHANNELS, CHANNELS, 1, 1, 1)
    _decoder(shapes, width)
    return shapes


def write_wan_vae(path: Path, *, width: int = 8, seed: int = 0) -> Path:
    """Write a Wan 2.1 VAE, as `VAELoader` reads it. It decodes to coloured noise that follows the latent."""
    tensors = fill(wan_vae_shapes(width), seed)
    for name, tensor in tensors.items():
        if name.endswith("gamma"):
            tensor.mul_(0.1).add_(1)
    save_file({name: t.to(torch.float16) for name, t in tensors.items()}, path, {"format": "pt"})
    return path

"""The tiny VAE from `vae.safetensors` in this folder, trained by `tools/try_it/train_vae.py`.

One small network encodes and decodes each colour separately. Here three of them are placed block-diagonally in the
channels of a TAESD (`comfy/taesd/taesd.py`): its residual blocks with zero weights pass positive values through.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

FILE = Path(__file__).with_name("vae.safetensors")
COLOURS = 3
WIDTH = 20
LATENT = 5
HIDDEN, CHANNELS = 64, 16  # of TAESD
SCALE, SHIFT = 0.3611, 0.1159  # of FLUX's latents (comfy/latent_formats.py), not applied in the file
# Indices of TAESD's layers: residual blocks, convolutions that halve or double, and first and last layers.
ENCODER_BLOCKS, ENCODER_CONVS = (1, 3, 4, 5, 7, 8, 9, 11, 12, 13), {0: "first", 2: "down.0", 6: "down.1", 10: "down.2"}
DECODER_BLOCKS, DECODER_CONVS = (3, 4, 5, 8, 9, 10, 13, 14, 15, 18), {1: "first", 7: "up.0", 12: "up.1", 17: "up.2"}
LAST = {"encoder": 14, "decoder": 19}


def vae_tensors() -> dict[str, Tensor]:
    """Return weights of a TAESD with 16 latent channels, fp32. The last channel is the mean of the colours' first
    channels."""
    small = {name: tensor.float() for name, tensor in load_file(FILE).items()}
    tensors: dict[str, Tensor] = {}
    for part, blocks, convs in (
        ("encoder", ENCODER_BLOCKS, ENCODER_CONVS),
        ("decoder", DECODER_BLOCKS, DECODER_CONVS),
    ):
        for block in blocks:
            for index in (0, 2, 4):
                tensors[f"taesd_{part}.{block}.conv.{index}.weight"] = torch.zeros(HIDDEN, HIDDEN, 3, 3)
                tensors[f"taesd_{part}.{block}.conv.{index}.bias"] = torch.zeros(HIDDEN)
        for place, name in (convs | {LAST[part]: "last"}).items():
            weight, bias = small[f"{part}.{name}.weight"], small.get(f"{part}.{name}.bias")
            outputs, inputs = _channels(part, name)
            wide, wide_bias = torch.zeros(outputs, inputs, 3, 3), torch.zeros(outputs)
            high, deep = weight.shape[:2]
            for colour in range(COLOURS):
                rows, columns = slice(colour * high, (colour + 1) * high), slice(colour * deep, (colour + 1) * deep)
                wide[rows, columns] = weight
                if bias is not None:
                    wide_bias[rows] = bias
            if outputs == CHANNELS:
                wide[-1], wide_bias[-1] = wide[:-1:LATENT].mean(0), wide_bias[:-1:LATENT].mean()
            tensors[f"taesd_{part}.{place}.weight"] = wide
            if bias is not None:
                tensors[f"taesd_{part}.{place}.bias"] = wide_bias
    return tensors | {"vae_scale": torch.tensor(SCALE), "vae_shift": torch.tensor(SHIFT)}


def _channels(part: str, name: str) -> tuple[int, int]:
    """Return outputs and inputs of a convolution of TAESD."""
    ends = {"encoder": (CHANNELS, COLOURS), "decoder": (COLOURS, CHANNELS)}[part]
    return ends[0] if name == "last" else HIDDEN, ends[1] if name == "first" else HIDDEN

"""A hand-set TAESD: it encodes by taking means and decodes by repeating, so that a picture comes back as its 8x8 means.

Of the 64 hidden channels twelve carry the picture: red, green and blue of each quarter of an 8x8 cell. All other
weights of the residual blocks are zero, so each block passes its (positive) input through.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN = 64
# latent = CONTRAST * (mean - 0.5): within one, the range in which the decoder's 3 * tanh(x / 3) is close to x.
CONTRAST = 2.0
FLUX_SCALE, FLUX_SHIFT = 0.3611, 0.1159
SD1_SCALE, SD1_SHIFT = 0.18215, 0.0
ENCODER_BLOCKS = (1, 3, 4, 5, 7, 8, 9, 11, 12, 13)
ENCODER_STRIDES = (2, 6, 10)
ENCODER_OUT = 14
DECODER_BLOCKS, DECODER_CONVS = (3, 4, 5, 8, 9, 10, 13, 14, 15, 18), (7, 12, 17)


def _latent_map(channels: int) -> Tensor:
    """(channels, 12): weights of the quarters' colours in each latent channel (quarter-major: 3 * quarter + colour)."""
    colours = torch.eye(12) if channels >= 12 else torch.eye(3).repeat(1, 4) / 4
    greys = torch.eye(4).repeat_interleave(3, dim=1) / 3 if channels >= 12 else torch.full((1, 12), 1 / 12)
    return torch.cat([colours, greys])


def taesd_tensors(channels: int) -> dict[str, Tensor]:
    if channels not in (4, 16):
        raise ValueError(f"channels is {channels}; the tiny TAESD is made with 4 or 16.")
    tensors: dict[str, Tensor] = {}

    def conv(name: str, outputs: int, inputs: int, bias: bool = True) -> Tensor:
        weight = tensors[f"{name}.weight"] = torch.zeros(outputs, inputs, 3, 3)
        if bias:
            tensors[f"{name}.bias"] = torch.zeros(outputs)
        return weight

    def block(name: str) -> None:
        for index in (0, 2, 4):
            conv(f"{name}.conv.{index}", HIDDEN, HIDDEN)

    encoder, decoder = "taesd_encoder", "taesd_decoder"
    conv(f"{encoder}.0", HIDDEN, 3)[:3, :, 1, 1] = torch.eye(3)
    for index in ENCODER_BLOCKS:
        block(f"{encoder}.{index}")
    halve, quarter, gather = (conv(f"{encoder}.{index}", HIDDEN, HIDDEN, bias=False) for index in ENCODER_STRIDES)
    for colour in range(3):
        halve[colour, colour, 1:, 1:] = 0.25
        quarter[colour, colour, 1:, 1:] = 0.25
        for q in range(4):
            gather[3 * q + colour, colour, 1 + q // 2, 1 + q % 2] = 1
    latent = _latent_map(channels)
    conv(f"{encoder}.{ENCODER_OUT}", channels, HIDDEN)[:, :12, 1, 1] = CONTRAST * latent
    tensors[f"{encoder}.{ENCODER_OUT}.bias"] -= CONTRAST / 2

    mean = torch.eye(3).repeat(1, 4) / 4 if channels >= 12 else torch.eye(3)
    used = mean.shape[1]
    conv(f"{decoder}.1", HIDDEN, channels)[:3, :used, 1, 1] = mean / CONTRAST
    tensors[f"{decoder}.1.bias"][:3] = 0.5
    for index in DECODER_BLOCKS:
        block(f"{decoder}.{index}")
    for index in DECODER_CONVS:
        conv(f"{decoder}.{index}", HIDDEN, HIDDEN, bias=False)[:3, :3, 1, 1] = torch.eye(3)
    conv(f"{decoder}.19", 3, HIDDEN)[:, :3, 1, 1] = torch.eye(3)
    return tensors


def write_taesd(path: Path, *, channels: int = 16) -> Path:
    """Write FLUX's TAESD (16 latent channels) or Stable Diffusion 1's (4) as one file, as `VAELoader` reads it."""
    scale, shift = (FLUX_SCALE, FLUX_SHIFT) if channels == 16 else (SD1_SCALE, SD1_SHIFT)
    tensors = {name: t.to(torch.float16) for name, t in taesd_tensors(channels).items()}
    tensors |= {"vae_scale": torch.tensor(scale), "vae_shift": torch.tensor(shift)}
    save_file(tensors, path, {"format": "pt"})
    return path


def load_vae(path: Path) -> Any:
    """The VAE that `VAELoader` gives for this file."""
    import comfy.sd
    import comfy.utils

    weights, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
    vae = comfy.sd.VAE(sd=weights, metadata=metadata)
    vae.throw_exception_if_invalid()
    return vae

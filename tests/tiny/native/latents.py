"""A VAE for models of which no tiny one exists."""

from typing import Any

import torch
from torch import Tensor


class Latents:
    """Keeps the latents that it decodes."""

    latent_channels = None

    def __init__(self) -> None:
        self.decoded: list[Tensor] = []

    def decode(self, latent: Tensor) -> Any:
        self.decoded.append(latent.clone())
        return torch.zeros(1, 8, 8, 3)

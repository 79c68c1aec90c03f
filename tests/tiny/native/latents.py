"""A VAE for models of which no tiny one exists."""

from typing import Any

import torch
from torch import Tensor


class Latents:
    """Keeps what it is given to decode."""

    latent_channels = None

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def decode(self, latent: Tensor) -> Any:
        self.seen.append(latent.clone())
        return torch.zeros(1, 8, 8, 3)

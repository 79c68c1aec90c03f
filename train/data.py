"""What the trainer trains on: samples whose tensors are read when a batch needs them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class SampleTensors:
    """One sample on the host.

    latent: (C, H, W) or (C, T, H, W), as the VAE gives it, before the model's `process_latent_in`.
    text: (1, L, D), the `cond` of ComfyUI's conditioning.
    conditioning: the dict of ComfyUI's conditioning (`pooled_output`, …).
    """

    latent: Tensor
    text: Tensor
    conditioning: Mapping[str, Any]


@dataclass(frozen=True)
class Sample:
    """One picture or clip with its caption.

    name: what messages call it (a file name, with the folders below the one that was chosen).
    grid: (frames, height, width) in tokens.
    tokens: how many of the grid's tokens are kept, counted from its start (ragged edge keeps fewer than all).
    text_length: L, the tokens of the caption as the model will see them.
    repeats: how often it is seen per epoch.
    load: reads the tensors.
    """

    name: str
    grid: tuple[int, int, int]
    tokens: int
    text_length: int
    load: Callable[[], SampleTensors] = field(compare=False, repr=False)
    repeats: int = 1

    def __post_init__(self) -> None:
        whole = prod(self.grid)
        assert whole - self.grid[-1] < self.tokens <= whole, (self.grid, self.tokens)


@dataclass(frozen=True)
class TrainingData:
    """Prepared data (TESSERA_TRAINING_DATA). `fingerprint` changes whenever a tensor, an order or a repeat changes."""

    samples: tuple[Sample, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()

    def graph_keys(self) -> list[tuple[int, int]]:
        """The (token count, text length) pairs that occur: one compiled graph of each block kind for each."""
        return sorted({(s.tokens, s.text_length) for s in self.samples})

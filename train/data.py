"""What the trainer trains on: samples whose tensors are read when a batch needs them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..models.family import SampleFacts

GraphKey = tuple[int, tuple[int, ...], int]
"""(token count, tokens of each reference picture, text length): what the shapes of a step depend on."""


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
    grid: (frames, height, width) in tokens; frames are those of the latent.
    tokens: how many of the grid's tokens are kept, equally many of each frame, counted from the frame's start (a ragged
        edge keeps fewer than all).
    text_length: L, the tokens of the caption as the model will see them.
    repeats: how often it is seen per epoch.
    references: the tokens of each reference picture.
    clean_frames: latent frames at the start that are given without noise and are no part of the loss.
    conditioning: what `SampleTensors.conditioning` carries.
    load: reads the tensors.
    """

    name: str
    grid: tuple[int, int, int]
    tokens: int
    text_length: int
    load: Callable[[], SampleTensors] = field(compare=False, repr=False)
    repeats: int = 1
    references: tuple[int, ...] = ()
    clean_frames: int = 0
    conditioning: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        frames, height, width = self.grid
        kept, rest = divmod(self.tokens, frames)
        assert rest == 0 and height * width - width < kept <= height * width, (self.grid, self.tokens)
        assert 0 <= self.clean_frames < frames or self.clean_frames == 0, (self.clean_frames, frames)

    @property
    def graph_key(self) -> GraphKey:
        return self.tokens, self.references, self.text_length

    def facts(self) -> SampleFacts:
        return SampleFacts(
            self.name, self.grid[0], self.references, self.clean_frames, self.conditioning, self.text_length
        )


@dataclass(frozen=True)
class TrainingData:
    """Prepared data (TESSERA_TRAINING_DATA). `fingerprint` changes whenever a tensor, an order or a repeat changes."""

    samples: tuple[Sample, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()

    def graph_keys(self) -> list[GraphKey]:
        """The keys that occur: one compiled graph of each block kind for each."""
        return sorted({s.graph_key for s in self.samples})

"""Training data: samples whose tensors are read when a batch needs them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..models.family import SampleFacts

GraphKey = tuple[int, tuple[int, ...], int]
"""(token count, tokens of each reference picture, text length): what the shapes of a step depend on."""


@dataclass(frozen=True)
class SampleVariant:
    """Variant of a sample that is shown.

    image: number of the image variant. caption: number of the caption variant, None for the empty prompt.
    class_caption: the class caption of that caption is read too.
    """

    image: int = 0
    caption: int | None = 0
    class_caption: bool = False


FIRST_VARIANT = SampleVariant()


@dataclass(frozen=True)
class Prompt:
    """A caption as it was encoded, with all that goes with it: see `SampleTensors`."""

    text: Tensor
    conditioning: Mapping[str, Any]


@dataclass(frozen=True)
class SampleTensors:
    """One sample on the host.

    latent: (C, H, W) or (C, T, H, W), as the VAE gives it, before the model's `process_latent_in`.
    text: (1, L, D), the `cond` of ComfyUI's conditioning.
    conditioning: the dict of ComfyUI's conditioning (`pooled_output`, …).
    weights: (tokens,) fp32, how much each kept token counts in the loss; None where all count alike.
    class_prompt: the class caption, where the choice asked for it.
    """

    latent: Tensor
    text: Tensor
    conditioning: Mapping[str, Any]
    weights: Tensor | None = None
    class_prompt: Prompt | None = None


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
    load: reads the tensors of a SampleVariant, by default of the first image and the first caption.
    image_variants, caption_variants: how many there are; all have the sample's grid and text length.
    loss_weight: what its loss is multiplied by. regularisation: it shows what the model is to keep; `repeats` counts
        among samples like it.
    class_caption: there is a caption that names the class in place of the trigger words.
    file: the picture or film that it was taken from, where `name` says more than that.
    caption_weights: how likely each form of the caption is, 1 in sum; without them all are alike. caption_dropout: how
        likely the empty prompt takes the place of any of them.
    """

    name: str
    grid: tuple[int, int, int]
    tokens: int
    text_length: int
    load: Callable[..., SampleTensors] = field(compare=False, repr=False)
    repeats: int = 1
    references: tuple[int, ...] = ()
    clean_frames: int = 0
    conditioning: frozenset[str] = frozenset()
    image_variants: int = 1
    caption_variants: int = 1
    loss_weight: float = 1.0
    regularisation: bool = False
    class_caption: bool = False
    file: str = ""
    caption_weights: tuple[float, ...] = ()
    caption_dropout: float = 0.0

    def __post_init__(self) -> None:
        assert len(self.caption_weights) in (0, self.caption_variants), (self.caption_weights, self.caption_variants)
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
    """Prepared data (TESSERA_TRAINING_DATA). `fingerprint` changes whenever a tensor, an order or a repeat changes.
    made_with: what was set to make it, as plain values, for the LoRA's metadata. family: the `TextPolicy.family` whose
    encoders made it, which the family's title begins with; empty where that is not known."""

    samples: tuple[Sample, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()
    made_with: Mapping[str, Any] = field(default_factory=dict, compare=False)
    family: str = ""

    def graph_keys(self) -> list[GraphKey]:
        """List the keys that occur: one compiled graph of each block kind for each."""
        return sorted({s.graph_key for s in self.samples})


def shown_per_epoch(samples: Sequence[Sample]) -> int:
    """Count the showings of an epoch, repeats included: next to each of a training sample there is one of a
    regularisation sample, where there are any."""
    training = sum(sample.repeats for sample in samples if not sample.regularisation)
    return 2 * training if any(sample.regularisation for sample in samples) else training


def check_training_samples(regularisation: Iterable[bool]) -> None:
    """ValueError where all samples are regularisation."""
    if all(regularisation):
        raise ValueError(
            "Every picture of the data set is a regularisation picture, which leaves nothing to learn; chain a folder "
            "with regularisation off."
        )


def data_facts(data: TrainingData) -> dict[str, Any]:
    """fingerprint: of the data. made_with: what was set on the nodes that made it. buckets: each size that a step may
    have, in the order of their tokens: (frames, height, width) of the grid in tokens, the tokens kept, those of each
    reference, the text length, and how many samples there are."""
    sizes = Counter(map(_size, data.samples))
    names = ("grid", "tokens", "references", "text_length")
    buckets = sorted(sizes.items(), key=lambda item: (item[0][1], item[0]))
    return {
        "fingerprint": data.fingerprint,
        "samples": len(data.samples),
        "regularisation": sum(sample.regularisation for sample in data.samples),
        "shown_per_epoch": shown_per_epoch(data.samples),
        "pictures_per_sample": max(sample.image_variants for sample in data.samples),
        "captions_per_sample": max(sample.caption_variants for sample in data.samples),
        "made_with": dict(data.made_with),
        "buckets": [{**dict(zip(names, size, strict=True)), "samples": count} for size, count in buckets],
    }


def _size(sample: Sample) -> tuple[tuple[int, int, int], int, tuple[int, ...], int]:
    return sample.grid, sample.tokens, sample.references, sample.text_length

"""Training data: samples whose tensors are read when a batch needs them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..common.text import plain_phrase
from ..models.family import SampleFacts

GraphKey = tuple[int, tuple[int, ...], int]
"""(token count, tokens of each reference image, text length): all that the shapes of a step depend on."""


@dataclass(frozen=True)
class SampleVariant:
    """Variant of a sample.

    image: index of the image variant.
    caption: index of the caption variant; None for the empty prompt.
    class_caption: also read the class caption of that caption variant.
    empty_caption: also read the empty caption.
    """

    image: int = 0
    caption: int | None = 0
    class_caption: bool = False
    empty_caption: bool = False


FIRST_VARIANT = SampleVariant()

# Concepts, by their names in messages: they are taught in place of a sample's picture, see `data.concepts`.
SLIDER = "a slider"
ERASURE = "an erasure"
PICTURE_SLIDER = "a slider from pictures"


@dataclass(frozen=True)
class Prompt:
    """Encoded caption.

    text: (1, L, D), the `cond` of ComfyUI's conditioning.
    conditioning: the dict of ComfyUI's conditioning (`pooled_output`, …).
    """

    text: Tensor
    conditioning: Mapping[str, Any]


@dataclass(frozen=True)
class TargetPrompt:
    """Prompt whose prediction by the frozen model is a term of a target.

    prompt: the encoded prompt.
    weight: factor of the prediction.
    direction: further factor, negated at a strength of −1.
    """

    prompt: Prompt
    weight: float
    direction: float = 0.0


@dataclass(frozen=True)
class SampleTensors:
    """Tensors of one sample on the host.

    latent: (C, H, W) or (C, T, H, W), as the VAE outputs it, before the model's `process_latent_in`.
    text: (1, L, D), the `cond` of ComfyUI's conditioning.
    conditioning: the dict of ComfyUI's conditioning (`pooled_output`, …).
    weights: (tokens,) fp32, weight of each kept token in the loss; None for equal weights.
    class_prompt: the class caption, if the requested variant asks for it.
    empty_prompt: the empty caption, if the requested variant asks for it.
    targets: terms of the target, in place of the picture's; empty for the picture's own.
    opposite: latent of the picture at the other end of a slider, in the shape of `latent`; None without one.
    """

    latent: Tensor
    text: Tensor
    conditioning: Mapping[str, Any]
    weights: Tensor | None = None
    class_prompt: Prompt | None = None
    empty_prompt: Prompt | None = None
    targets: tuple[TargetPrompt, ...] = ()
    opposite: Tensor | None = None


@dataclass(frozen=True)
class Sample:
    """One image or video with its caption.

    name: name in messages, a file's path below the chosen folder.
    grid: (frames, height, width) in tokens; frames are latent frames.
    tokens: tokens of the grid that are kept, equally many of each frame, counted from the frame's start; a ragged edge
        keeps fewer than all.
    text_length: L, tokens of the caption after the model's padding.
    load: reads the tensors of a SampleVariant, by default of the first image and the first caption.
    repeats: showings per epoch, among samples with the same `regularisation`.
    references: tokens of each reference image.
    clean_frames: leading latent frames that stay without noise and are excluded from the loss.
    conditioning: keys of `SampleTensors.conditioning`.
    image_variants: number of image variants; all share the grid.
    caption_variants: number of caption variants; all share the text length, unless `text_lengths` lists several.
    loss_weight: factor of the sample's loss.
    regularisation: the sample shows content that the model should preserve.
    class_caption: there is a caption with the class word in place of the trigger words.
    file: image or video file that the sample was taken from; empty if `name` is that file.
    caption_weights: probability of each caption variant, 1 in sum; empty for equal probabilities.
    caption_dropout: probability that the empty prompt replaces the caption.
    empty_length: tokens of the empty prompt after the model's padding; 0 if it was not encoded.
    sample_ratio: fraction of its folder that an epoch shows, see `batch_order`.
    folder: index of its folder.
    text_lengths: every length of its captions, if the model takes them as they are encoded; empty if all have
        `text_length`.
    path: the file on disk, to show it; None if it is not known.
    concept: SLIDER, ERASURE or PICTURE_SLIDER; empty for a sample that teaches its picture.
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
    empty_length: int = 0
    sample_ratio: float = 1.0
    folder: int = 0
    text_lengths: tuple[int, ...] = ()
    path: Path | None = field(default=None, compare=False, repr=False)
    concept: str = ""

    def __post_init__(self) -> None:
        assert len(self.caption_weights) in (0, self.caption_variants), (self.caption_weights, self.caption_variants)
        frames, height, width = self.grid
        frame_tokens, rest = divmod(self.tokens, frames)
        assert rest == 0 and height * width - width < frame_tokens <= height * width, (self.grid, self.tokens)
        assert 0 <= self.clean_frames < frames or self.clean_frames == 0, (self.clean_frames, frames)

    @property
    def graph_key(self) -> GraphKey:
        """Key of the compiled graph that the sample needs."""
        return self.tokens, self.references, self.text_length

    @property
    def graph_keys(self) -> list[GraphKey]:
        """Keys of all graphs that its captions may need."""
        return [(self.tokens, self.references, length) for length in self.text_lengths or (self.text_length,)]

    def facts(self) -> SampleFacts:
        """Return the facts by which a model family checks whether it can train on the sample."""
        return SampleFacts(
            self.name, self.grid[0], self.references, self.clean_frames, self.conditioning, self.text_length
        )


@dataclass(frozen=True)
class Preparation:
    """Work and disk space of preparing data.

    cropping: sentences on how much of the images is cropped; empty if nothing was planned.
    seconds: of encoding, without reading what the cache had.
    cache_bytes: size of the data's files in the cache.
    """

    cropping: str = ""
    seconds: float = 0.0
    cache_bytes: int = 0


@dataclass(frozen=True)
class TrainingData:
    """Prepared data (TESSERA_TRAINING_DATA).

    samples: all samples, in the order of the data set.
    fingerprint: changes whenever a tensor, the order or a repeat count changes.
    notes: hints to the user.
    made_with: options of the preparation as plain values, for the LoRA's metadata.
    family: the `TextPolicy.family` of the encoders, with which the model family's title begins; empty if unknown.
    preparation: what encoding it took, for an estimate.
    """

    samples: tuple[Sample, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()
    made_with: Mapping[str, Any] = field(default_factory=dict, compare=False)
    family: str = ""
    preparation: Preparation = field(default=Preparation(), compare=False)

    def graph_keys(self, empty: bool = False) -> list[GraphKey]:
        """List the distinct graph keys; each block type is compiled once for each.

        empty: include those of the empty prompt.
        """
        empties = {(s.tokens, s.references, s.empty_length) for s in self.samples if empty and s.empty_length}
        return sorted({key for sample in self.samples for key in sample.graph_keys} | empties)


def shown_per_epoch(samples: Sequence[Sample]) -> int:
    """Count the showings of an epoch, with repeats and parts of folders.

    If there are regularisation samples, the epoch shows as many of them as training samples.
    """
    whole = sum(sample.repeats for sample in samples if sample.sample_ratio == 1 and not sample.regularisation)
    training = whole + sum(part_size for _, part_size in folder_parts(samples).values())
    return 2 * training if any(sample.regularisation for sample in samples) else training


def showings_by_key(samples: Sequence[Sample]) -> dict[GraphKey, float]:
    """Compute the mean number of showings of an epoch that need each graph key."""
    training = sum(sample.repeats * sample.sample_ratio for sample in samples if not sample.regularisation)
    preserved = sum(sample.repeats for sample in samples if sample.regularisation)
    showings: dict[GraphKey, float] = defaultdict(float)
    for sample in samples:
        share = training / preserved if sample.regularisation else sample.sample_ratio
        showings[sample.graph_key] += sample.repeats * share
    return dict(showings)


def folder_parts(samples: Sequence[Sample]) -> dict[int, tuple[list[int], int]]:
    """List the folders of which an epoch shows a part, by index: (sample indices, number shown).

    Each sample index is repeated `repeats` times; an epoch shows that number of them, at least 1.
    """
    pools: dict[int, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        if sample.sample_ratio < 1:
            pools[sample.folder] += [index] * sample.repeats
    return {folder: (pool, max(1, round(len(pool) * samples[pool[0]].sample_ratio))) for folder, pool in pools.items()}


def check_training_samples(regularisation: Iterable[bool]) -> None:
    """Check that the data has a sample to learn from; raises ValueError if all are regularisation samples."""
    if all(regularisation):
        raise ValueError(
            "All pictures are regularisation pictures, so there is nothing to learn; chain a folder with "
            "regularisation off."
        )


def trigger_words(made_with: Mapping[str, Any]) -> str:
    """Join the trigger words of the folders that data was made from, each once; empty without any.

    made_with: of `TrainingData`, or as read from a file.
    """
    folders = made_with.get("folders")
    facts = [folder for folder in folders if isinstance(folder, dict)] if isinstance(folders, list) else []
    texts = (folder.get("trigger_words") for folder in facts)
    phrases = (plain_phrase(text) for text in texts if isinstance(text, str))
    return ", ".join(dict.fromkeys(filter(None, phrases)))


def data_facts(data: TrainingData) -> dict[str, Any]:
    """Describe the data as plain values for metadata and reports.

    Returns a dict with:
    fingerprint: of the data.
    samples, regularisation, shown_per_epoch, pictures_per_sample, captions_per_sample: counts.
    made_with: options of the nodes that made the data.
    buckets: for each size of a step, sorted by tokens: grid (frames, height, width) in tokens, kept tokens, tokens of
        each reference, text length, and number of samples.
    """
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

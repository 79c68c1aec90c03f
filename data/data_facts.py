"""What a LoRA file says of the data that it was trained on: settings, sizes and counts, no names and no captions."""

from collections import Counter
from typing import Any

from .samples import Sample, TrainingData, shown_per_epoch


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
        "pictures_per_sample": max(sample.pictures for sample in data.samples),
        "captions_per_sample": max(sample.captions for sample in data.samples),
        "made_with": dict(data.made_with),
        "buckets": [{**dict(zip(names, size, strict=True)), "samples": count} for size, count in buckets],
    }


def _size(sample: Sample) -> tuple[tuple[int, int, int], int, tuple[int, ...], int]:
    return sample.grid, sample.tokens, sample.references, sample.text_length

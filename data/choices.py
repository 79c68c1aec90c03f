"""Which form of a sample a step shows, where there are several: its crops and flips, and its captions."""

from bisect import bisect
from itertools import accumulate

import torch

from ..common.rng import generator
from .samples import PLAIN, Choice, Sample


def choose(sample: Sample, seed: int, draw: tuple[int, int], place: int) -> Choice:
    """Draws the picture, each form as likely as the others, and the caption, each form as likely as the sample says.
    draw: (step, micro-batch); place: in the batch. The same arguments give the same choice, after a resume too."""
    if sample.pictures == sample.captions == 1 and not sample.caption_dropout:
        return PLAIN
    return Choice(_one_of(sample.pictures, seed, "picture", *draw, place), _caption(sample, seed, *draw, place))


def _caption(sample: Sample, seed: int, *keys: int) -> int | None:
    if sample.caption_dropout and _number(seed, "caption dropout", *keys) < sample.caption_dropout:
        return None
    if not sample.caption_weights:
        return _one_of(sample.captions, seed, "caption", *keys)
    # The last sum may be a little below 1.
    bounds = list(accumulate(sample.caption_weights))[:-1]
    return bisect(bounds, _number(seed, "caption", *keys))


def _one_of(count: int, seed: int, *keys: int | str) -> int:
    return 0 if count == 1 else int(torch.randint(count, (), generator=generator(seed, *keys)))


def _number(seed: int, *keys: int | str) -> float:
    """Between 0 and 1, 1 left out."""
    return float(torch.rand((), dtype=torch.float64, generator=generator(seed, *keys)))

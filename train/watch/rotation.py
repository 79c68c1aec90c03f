"""Rotation of pictures: which are measured next, at how many noise levels, and what that costs."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from ...common.rng import generator
from ...data.samples import GraphKey, Sample
from ..config.settings import TrainSettings

SHARE = 0.05  # of the run's work
FORWARDS = 3  # work of training on one sample: a forward, and a backward that takes two

Row = tuple[int, float]
"""(picture, sigma)."""


@dataclass(frozen=True)
class Picture:
    """Picture or film that is measured by one of its samples, the one with the most tokens.

    name: its file.
    sample: that sample.
    """

    name: str
    sample: Sample


def list_pictures(samples: Sequence[Sample]) -> list[Picture]:
    """List the files of samples, in the order of the samples."""
    by_file: dict[tuple[int, str], Sample] = {}
    for sample in samples:
        key = sample.folder, sample.file or sample.name
        if key not in by_file or sample.tokens > by_file[key].tokens:
            by_file[key] = sample
    return [Picture(name, sample) for (_, name), sample in by_file.items()]


def budget(settings: TrainSettings, steps: int) -> int:
    """Count the forwards of samples that SHARE of so many steps is worth."""
    return int(SHARE * FORWARDS * steps * settings.batch_size * settings.gradient_accumulation + 1e-9)


class Rotation:
    """Order in which pictures take turns, and the cost of measuring them.

    A cost counts forwards of samples, and those that fill up a batch: a compiled graph has a fixed batch size.

    pictures: those that are trained on, then the held-out ones.
    trained: number of those that are trained on.
    batch_size: samples of a batch.
    """

    def __init__(self, trained: Sequence[Picture], held_out: Sequence[Picture], batch_size: int, seed: int) -> None:
        self.pictures = [*trained, *held_out]
        self.trained = len(trained)
        self.batch_size = batch_size
        self.order: list[int] = torch.randperm(self.trained, generator=generator(seed, "loss by picture")).tolist()

    def turns(self, taken_turns: int) -> Iterator[int]:
        """Yield the training pictures once, beginning after the `taken_turns` turns."""
        begin = taken_turns % self.trained
        yield from (*self.order[begin:], *self.order[:begin])

    def mixed(self, taken_turns: int) -> Iterator[int]:
        """Yield the same, and before every three of them a held-out picture as long as there is one."""
        unseen = iter(range(self.trained, len(self.pictures)))
        for number, index in enumerate(self.turns(taken_turns)):
            if number % 3 == 0:
                yield from islice(unseen, 1)
            yield index

    def batches(self, pictures: Iterable[int], levels: Sequence[float]) -> list[list[Row]]:
        """List batches of (picture, sigma), each of one graph key, that cover every pair."""
        keys: dict[GraphKey, list[Row]] = defaultdict(list)
        for index in pictures:
            keys[self.pictures[index].sample.graph_key] += [(index, sigma) for sigma in levels]
        size = self.batch_size
        return [rows[start : start + size] for rows in keys.values() for start in range(0, len(rows), size)]

    def cost(self, pictures: Sequence[int], levels: Sequence[float], is_new: Callable[[int], bool]) -> int:
        """Count the forwards with the LoRA, and those of the base model for pictures that are new."""
        groups = pictures, [index for index in pictures if is_new(index)]
        return self.batch_size * sum(len(self.batches(group, levels)) for group in groups)

    def choose(
        self, candidates: Iterator[int], levels: Sequence[float], allowed: int, is_new: Callable[[int], bool]
    ) -> list[int]:
        """Take candidates as long as measuring them costs no more than allowed."""
        selection: list[int] = []
        for index in candidates:
            if self.cost([*selection, index], levels, is_new) > allowed:
                break
            selection.append(index)
        return selection

    def whole_cost(self, levels: Sequence[float]) -> int:
        """Count the forwards of all pictures that `mixed` yields, the base model's included."""
        return self.cost(list(self.mixed(0)), levels, lambda index: True)

    def choose_levels(self, levels: Sequence[float], total: int) -> tuple[float, ...]:
        """Choose the most levels at which the budget buys all pictures, evenly spread; at least the middle one."""
        for count in range(len(levels), 1, -1):
            spread = tuple(levels[(2 * i + 1) * len(levels) // (2 * count)] for i in range(count))
            if self.whole_cost(spread) <= total:
                return spread
        return (levels[len(levels) // 2],)

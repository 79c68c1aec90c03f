"""Captions of tags: fixed tags, and the orders and selections of the free ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, permutations
from math import comb, factorial

import torch

COUNTED = 12  # free tags: half of them give more variants than a caption may have


@dataclass(frozen=True)
class TagRules:
    """Rules for the tags of a caption.

    shuffle: free tags come in any order.
    dropout: probability that a free tag is left out.
    keep: number of tags at the start that stay there, in captions without the separator.
    separator: mark between the leading fixed tags and the free ones; a second one precedes the trailing fixed tags.
    """

    shuffle: bool = False
    dropout: float = 0.0
    keep: int = 0
    separator: str = "|||"

    @property
    def makes_variants(self) -> bool:
        """True if the rules make variants."""
        return self.shuffle or self.dropout > 0


@dataclass(frozen=True)
class Tags:
    """Tags of one caption.

    first: fixed tags at the start.
    free: tags that may be shuffled or dropped.
    last: fixed tags at the end.
    """

    first: tuple[str, ...]
    free: tuple[str, ...]
    last: tuple[str, ...] = ()

    def text(self, free: tuple[str, ...]) -> str:
        """Join the fixed tags with this selection of free ones."""
        return ", ".join((*self.first, *free, *self.last))

    def count(self, rules: TagRules) -> int:
        """Count the variants, taking all tags as different. Exact for up to COUNTED tags, and too low above."""
        free = min(len(self.free), COUNTED)
        sizes = range(free + 1) if rules.dropout else (free,)
        return sum(comb(free, size) * (factorial(size) if rules.shuffle else 1) for size in sizes)

    def variants(self, rules: TagRules) -> Iterator[tuple[str, float]]:
        """Yield the text of each variant with its probability; the caption as written comes first."""
        free = len(self.free)
        for size in range(free, -1 if rules.dropout else free - 1, -1):
            likely = (1 - rules.dropout) ** size * rules.dropout ** (free - size)
            for selection in combinations(self.free, size):
                orders = permutations(selection) if rules.shuffle else (selection,)
                share = likely / (factorial(size) if rules.shuffle else 1)
                for order in orders:
                    yield self.text(order), share

    def sample(self, rules: TagRules, generator: torch.Generator) -> tuple[tuple[int, ...], str]:
        """Sample one variant; returns the indices of its free tags in their order, and its text."""
        free = len(self.free)
        order = torch.randperm(free, generator=generator).tolist() if rules.shuffle else range(free)
        draws = torch.rand(free, generator=generator, dtype=torch.float64).tolist() if rules.dropout else [1.0] * free
        indices = tuple(index for index in order if draws[index] >= rules.dropout)
        return indices, self.text(tuple(self.free[index] for index in indices))


def split_tags(caption: str, rules: TagRules) -> Tags:
    """Split a caption at its commas into tags, without empty ones."""
    if rules.separator and rules.separator in caption:
        first, free, *last = caption.split(rules.separator, 2)
        return Tags(_tags(first), _tags(free), _tags(last[0]) if last else ())
    tags = _tags(caption)
    return Tags(tags[: rules.keep], tags[rules.keep :])


def _tags(text: str) -> tuple[str, ...]:
    return tuple(tag for part in text.split(",") if (tag := part.strip()))

"""Share of a device: the samples of an optimizer step that it computes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """Samples of each optimizer step that one device computes.

    part: index of its part of a micro-batch, from 0.
    parts: equal parts that each micro-batch is split into.
    first_micro: index of its first micro-batch in the step; the others follow it.
    micros: number of its micro-batches in a step.
    rows: number of its samples in each of them, from index `part * rows` on.
    """

    part: int
    parts: int
    first_micro: int
    micros: int
    rows: int

    @property
    def micro_batches(self) -> range:
        """Indices of its micro-batches in the step."""
        return range(self.first_micro, self.first_micro + self.micros)

    @property
    def samples(self) -> range:
        """Indices of its samples in each of them."""
        return range(self.part * self.rows, (self.part + 1) * self.rows)

    def numbered(self, micro_batches: Sequence[T]) -> Iterator[tuple[int, T]]:
        """Yield its micro-batches with their indices in the step."""
        return enumerate(micro_batches, start=self.first_micro)


def shard_step(rank: int, world_size: int, batch_size: int, accumulation: int) -> Share:
    """Distribute the samples of a step evenly over all devices; return the share of device `rank`.

    A micro-batch is split into as many equal parts as possible, and the micro-batches are distributed over the groups
    of devices that this forms: of 4 devices with batch_size 2 and accumulation 2, two compute one half each of the
    first micro-batch.

    Raises ValueError if the samples can't be distributed evenly.
    """
    if not _divides(world_size, batch_size, accumulation):
        batch_sizes = range(batch_size + 1, batch_size + world_size + 1)
        fitting_batch = next(n for n in batch_sizes if _divides(world_size, n, accumulation))
        accumulations = range(accumulation + 1, accumulation + world_size + 1)
        fitting_accumulation = next(n for n in accumulations if _divides(world_size, batch_size, n))
        raise ValueError(
            f"batch_size is {batch_size} and gradient_accumulation {accumulation}, which {world_size} devices can't "
            f"share evenly; set batch_size to {fitting_batch}, or gradient_accumulation to {fitting_accumulation}."
        )
    parts = gcd(batch_size, world_size)
    micros = accumulation // (world_size // parts)
    return Share(rank % parts, parts, rank // parts * micros, micros, batch_size // parts)


def _divides(size: int, batch_size: int, accumulation: int) -> bool:
    return accumulation % (size // gcd(batch_size, size)) == 0

"""Which samples meet in which batch, for as long as anyone asks."""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import torch

from .data import GraphKey, Sample
from .draws import generator


def batch_order(samples: Sequence[Sample], batch_size: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Endless batches of `batch_size` sample indices, the same for the same arguments.

    Every epoch is a new shuffle of all samples, each as often as its `repeats`. Samples that share a token count, the
    tokens of their references and a text length share batches, whatever their aspect ratio. What is left of an epoch
    waits for the next one, so that no sample is ever dropped and no batch is short.
    """
    pool = [index for index, sample in enumerate(samples) for _ in range(sample.repeats)]
    waiting: dict[GraphKey, deque[int]] = defaultdict(deque)
    epoch = 0
    while True:
        shuffle = torch.randperm(len(pool), generator=generator(seed, "epoch", epoch))
        for place in shuffle.tolist():
            index = pool[place]
            queue = waiting[samples[index].graph_key]
            queue.append(index)
            if len(queue) == batch_size:
                yield tuple(queue)
                queue.clear()
        epoch += 1

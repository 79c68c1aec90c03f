"""Which samples meet in which batch, for as long as anyone asks."""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import count, islice

import torch

from ..common.rng import generator
from .samples import GraphKey, Sample


def batch_order(samples: Sequence[Sample], batch_size: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Endless batches of `batch_size` sample indices, the same for the same arguments.

    Every epoch is a new shuffle of all samples, each as often as its `repeats`. Samples that share a token count, the
    tokens of their references and a text length share batches, whatever their aspect ratio. What is left of an epoch
    waits for the next one, so that no sample is ever dropped and no batch is short.

    Regularisation samples are shown as often as all others together, as kohya-ss/sd-scripts shows them: an epoch takes
    as many of them, in a shuffle of their own that goes on from one epoch to the next, in which each comes as often as
    its repeats. (sd-scripts takes the first of them in every epoch; where they are more, it never shows the rest.)
    """
    training = _pool(samples, regularisation=False)
    assert training
    kept = _regularisation(samples, seed)
    waiting: dict[GraphKey, deque[int]] = defaultdict(deque)
    epoch = 0
    while True:
        pool = [*training, *islice(kept, len(training))]
        shuffle = torch.randperm(len(pool), generator=generator(seed, "epoch", epoch))
        for place in shuffle.tolist():
            index = pool[place]
            queue = waiting[samples[index].graph_key]
            queue.append(index)
            if len(queue) == batch_size:
                yield tuple(queue)
                queue.clear()
        epoch += 1


def _regularisation(samples: Sequence[Sample], seed: int) -> Iterator[int]:
    """Regularisation samples for as long as anyone asks, none where there are none."""
    pool = _pool(samples, regularisation=True)
    for turn in count() if pool else ():
        shuffle = torch.randperm(len(pool), generator=generator(seed, "regularisation", turn))
        yield from (pool[place] for place in shuffle.tolist())


def _pool(samples: Sequence[Sample], regularisation: bool) -> list[int]:
    """The indices of either kind, each as often as its repeats."""
    of_kind = [(index, one.repeats) for index, one in enumerate(samples) if one.regularisation == regularisation]
    return [index for index, repeats in of_kind for _ in range(repeats)]

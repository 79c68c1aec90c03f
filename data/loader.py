"""Load training samples: the order of batches, the variant of a sample that a step shows, and reading ahead."""

from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, count, islice

import torch

from ..common.rng import generator
from .samples import FIRST_VARIANT, GraphKey, Sample, SampleTensors, SampleVariant

SampleRequest = tuple[int, SampleVariant]
"""A sample by its index, and the form of it that is shown."""


def batch_order(samples: Sequence[Sample], batch_size: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Infinite seeded batch sampler: batches of `batch_size` sample indices, the same for the same arguments.

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
    """Yield indices of regularisation samples without end, none where there are none."""
    pool = _pool(samples, regularisation=True)
    for turn in count() if pool else ():
        shuffle = torch.randperm(len(pool), generator=generator(seed, "regularisation", turn))
        yield from (pool[place] for place in shuffle.tolist())


def _pool(samples: Sequence[Sample], regularisation: bool) -> list[int]:
    """The indices of either kind, each as often as its repeats."""
    of_kind = [(index, one.repeats) for index, one in enumerate(samples) if one.regularisation == regularisation]
    return [index for index, repeats in of_kind for _ in range(repeats)]


def choose_variant(sample: Sample, seed: int, step: tuple[int, int], place: int) -> SampleVariant:
    """Draws the picture, each form as likely as the others, and the caption, each form as likely as the sample says.
    step: (step, micro-batch); place: in the batch. The same arguments give the same choice, after a resume too."""
    if sample.image_variants == sample.caption_variants == 1 and not sample.caption_dropout:
        return FIRST_VARIANT
    return SampleVariant(
        _one_of(sample.image_variants, seed, "picture", *step, place), _caption(sample, seed, *step, place)
    )


def _caption(sample: Sample, seed: int, *keys: int) -> int | None:
    if sample.caption_dropout and _number(seed, "caption dropout", *keys) < sample.caption_dropout:
        return None
    if not sample.caption_weights:
        return _one_of(sample.caption_variants, seed, "caption", *keys)
    # The last sum may be a little below 1.
    bounds = list(accumulate(sample.caption_weights))[:-1]
    return bisect(bounds, _number(seed, "caption", *keys))


def _one_of(count: int, seed: int, *keys: int | str) -> int:
    return 0 if count == 1 else int(torch.randint(count, (), generator=generator(seed, *keys)))


def _number(seed: int, *keys: int | str) -> float:
    """Between 0 and 1, 1 left out."""
    return float(torch.rand((), dtype=torch.float64, generator=generator(seed, *keys)))


class SampleReader:
    """A thread that reads ahead. The GPU would otherwise wait for the disk between two steps."""

    def __init__(self, samples: Sequence[Sample]):
        self._samples = samples
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tessera-reader")
        self._ahead: dict[SampleRequest, Future[SampleTensors]] = {}

    def prefetch(self, wanted: Iterable[SampleRequest]) -> None:
        """Start reading these, keep those among them that are read already, and drop all others."""
        ahead: dict[SampleRequest, Future[SampleTensors]] = {}
        for shown in dict.fromkeys(wanted):
            index, choice = shown
            ahead[shown] = self._ahead.get(shown) or self._pool.submit(self._samples[index].load, choice)
        self._ahead = ahead

    def read(self, shown: SampleRequest) -> SampleTensors:
        """Return the sample's tensors; wait for the thread where it is reading them, and raise what reading raised."""
        future = self._ahead.get(shown)
        return self._samples[shown[0]].load(shown[1]) if future is None else future.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._ahead.clear()

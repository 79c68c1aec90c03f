"""Sample loader: order of batches, variant choice at each step, and reading ahead."""

from bisect import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, count, islice

import torch

from ..common.rng import generator
from .samples import FIRST_VARIANT, GraphKey, Sample, SampleTensors, SampleVariant, folder_parts, showings_by_key

_BETWEEN_CHECKS = 10_000  # batches, a small part of a second

SampleRequest = tuple[int, SampleVariant]
"""(index of the sample, variant of it)"""


def batch_order(samples: Sequence[Sample], batch_size: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Infinite seeded batch sampler; yields batches of `batch_size` sample indices that share one `graph_key`.

    Each epoch is a new shuffle of all samples, each repeated `repeats` times. Samples of different aspect ratio share a
    batch if their token count, reference tokens and text length agree. Incomplete batches carry over to the next
    epoch, so no sample is dropped and no batch is short. The same arguments give the same order.

    A rare graph key, with fewer showings in an epoch than a batch has, gets a batch every few epochs. So that not all
    of them come in one epoch after none for several, each begins with some of its samples shown already, see
    `_head_starts`: a sample is shown up to `batch_size` - 1 times more in the whole run.

    With `sample_ratio` r < 1, each epoch takes the next r of the folder's own shuffle, which begins again when all of
    it was shown. OneTrainer does so, without a shuffle, for a concept whose `balancing` by repeats is below 1 (mgds,
    VariationSorting).

    Regularisation samples are shown as often as all training samples together, as in kohya-ss/sd-scripts. An epoch
    takes as many of them as it has training samples, from a shuffle of their own that continues across epochs, each
    repeated `repeats` times. (sd-scripts restarts with the first ones in each epoch; if there are more, the rest is
    never shown.)
    """
    assert not all(sample.regularisation for sample in samples)
    preserved = [index for index, sample in enumerate(samples) if sample.regularisation for _ in range(sample.repeats)]
    preserved_turns = _turns(preserved, seed, "regularisation")
    waiting: dict[GraphKey, deque[int]] = defaultdict(deque, _head_starts(samples, batch_size, seed))
    for epoch, training in enumerate(_epochs(samples, seed)):
        for index in _shuffled([*training, *islice(preserved_turns, len(training))], seed, "epoch", epoch):
            queue = waiting[samples[index].graph_key]
            queue.append(index)
            if len(queue) == batch_size:
                yield tuple(queue)
                queue.clear()


def _head_starts(samples: Sequence[Sample], batch_size: int, seed: int) -> dict[GraphKey, deque[int]]:
    """Choose the samples with which the next batch of each rare graph key begins.

    The keys, in order, are cut out of one long sequence of showings in batches: so about as many of their batches are
    complete in each epoch.
    """
    starts: dict[GraphKey, deque[int]] = {}
    showings = 0.0
    for key, per_epoch in sorted(showings_by_key(samples).items()):
        if per_epoch >= batch_size:
            continue
        members = [i for i, sample in enumerate(samples) if sample.graph_key == key for _ in range(sample.repeats)]
        starts[key] = deque(islice(_turns(members, seed, "rare", str(key)), int(showings) % batch_size))
        showings += per_epoch
    return starts


def skip_batches(order: Iterator[tuple[int, ...]], count: int, check_interrupted: Callable[[], None]) -> None:
    """Take `count` batches, as a resumed run has shown them. Checks for cancellation, as there may be millions."""
    for number in range(count):
        if number % _BETWEEN_CHECKS == 0:
            check_interrupted()
        next(order)


def _epochs(samples: Sequence[Sample], seed: int) -> Iterator[list[int]]:
    """Yield the indices of the training samples that each epoch shows, each repeated as often as it is shown."""
    parts = [
        (part_size, _turns(pool, seed, "sample ratio", folder))
        for folder, (pool, part_size) in folder_parts(samples).items()
    ]
    whole = {
        i: sample.repeats for i, sample in enumerate(samples) if sample.sample_ratio == 1 and not sample.regularisation
    }
    while True:
        times = Counter(whole)
        for part_size, turns in parts:
            times.update(islice(turns, part_size))
        yield [index for index in range(len(samples)) for _ in range(times[index])]


def _turns(pool: Sequence[int], seed: int, *keys: int | str) -> Iterator[int]:
    """Yield the pool endlessly, shuffled again in each pass; nothing for an empty one."""
    for turn in count() if pool else ():
        yield from _shuffled(pool, seed, *keys, turn)


def _shuffled(pool: Sequence[int], seed: int, *keys: int | str) -> list[int]:
    return [pool[place] for place in torch.randperm(len(pool), generator=generator(seed, *keys)).tolist()]


def choose_variant(sample: Sample, seed: int, step: tuple[int, int], place: int) -> SampleVariant:
    """Choose the image variant uniformly and the caption variant by the sample's weights.

    The choice depends on the arguments only, so a resumed run makes the same one.

    step: (step, micro-batch).
    place: position in the batch.
    """
    if sample.image_variants == sample.caption_variants == 1 and not sample.caption_dropout:
        return FIRST_VARIANT
    return SampleVariant(
        _one_of(sample.image_variants, seed, "picture", *step, place), _caption(sample, seed, *step, place)
    )


def _caption(sample: Sample, seed: int, *keys: int) -> int | None:
    """Choose the index of a caption variant; None is the empty prompt."""
    if sample.caption_dropout and _number(seed, "caption dropout", *keys) < sample.caption_dropout:
        return None
    if not sample.caption_weights:
        return _one_of(sample.caption_variants, seed, "caption", *keys)
    # The last sum is left out: by rounding it may be below 1, and a number above it would find no caption.
    bounds = list(accumulate(sample.caption_weights))[:-1]
    return bisect(bounds, _number(seed, "caption", *keys))


def _one_of(count: int, seed: int, *keys: int | str) -> int:
    """Sample a number from 0 to count - 1 uniformly."""
    return 0 if count == 1 else int(torch.randint(count, (), generator=generator(seed, *keys)))


def _number(seed: int, *keys: int | str) -> float:
    """Sample a number uniformly from [0, 1)."""
    return float(torch.rand((), dtype=torch.float64, generator=generator(seed, *keys)))


class SampleReader:
    """Background reader of samples: the GPU would otherwise wait for the disk between two steps."""

    def __init__(self, samples: Sequence[Sample]):
        self._samples = samples
        # One worker reads in the order of the requests, which is the order in which the steps need them.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tessera-reader")
        self._ahead: dict[SampleRequest, Future[SampleTensors]] = {}

    def prefetch(self, requests: Iterable[SampleRequest]) -> None:
        """Start to read these samples, retain those that an earlier call requested, and drop all others."""
        ahead: dict[SampleRequest, Future[SampleTensors]] = {}
        for request in dict.fromkeys(requests):
            index, choice = request
            ahead[request] = self._ahead.get(request) or self._pool.submit(self._samples[index].load, choice)
        self._ahead = ahead

    def read(self, request: SampleRequest) -> SampleTensors:
        """Return the tensors of a sample, after waiting for the worker if needed.

        Raises the error of the load if it failed.
        """
        future = self._ahead.get(request)
        return self._samples[request[0]].load(request[1]) if future is None else future.result()

    def close(self) -> None:
        """Cancel pending reads and drop all tensors; waits for the read in progress."""
        self._pool.shutdown(cancel_futures=True)
        self._ahead.clear()

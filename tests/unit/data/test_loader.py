"""The order of batches: fair, full, apart by graph, and a function of its arguments alone."""

from collections import Counter
from itertools import islice

import pytest
from tessera.data.loader import batch_order, skip_batches
from tessera.data.samples import Sample
from tessera.train.preflight.notes import rare_notes

# (tokens, text length) of each sample and its repeats: two shapes share 12 tokens.
SAMPLES = [
    Sample(f"s{i}", (1, height, width), height * width, length, lambda *_: None, repeats)
    for i, (height, width, length, repeats) in enumerate(
        [(3, 4, 256, 1), (4, 3, 256, 2), (2, 6, 256, 1), (3, 4, 512, 3), (5, 5, 256, 1), (5, 5, 256, 1), (1, 7, 256, 1)]
    )
]
POOL = Counter({index: s.repeats for index, s in enumerate(SAMPLES)})
CYCLES = 300


def batches(size, seed=0, count=200, samples=SAMPLES):
    return list(islice(batch_order(samples, size, seed), count))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_batch_is_full_and_its_mates_share_token_count_and_text_length(size):
    for batch in batches(size):
        assert len(batch) == size
        assert len({(SAMPLES[i].tokens, SAMPLES[i].text_length) for i in batch}) == 1


def test_mates_may_differ_in_shape():
    assert any(len({SAMPLES[i].grid for i in batch}) > 1 for batch in batches(2))


def test_alone_each_sample_is_seen_as_often_as_it_repeats_in_every_epoch():
    length = POOL.total()
    indices = [i for (i,) in batches(1, count=5 * length)]
    epochs = [indices[start : start + length] for start in range(0, len(indices), length)]
    assert all(Counter(epoch) == POOL for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_samples_are_not_dropped_and_the_rest_of_an_epoch_comes_in_the_next(size):
    counts = Counter(i for batch in batches(size, count=CYCLES * POOL.total() // size) for i in batch)
    for index, repeats in POOL.items():
        # A group waits for at most a batch of its own, which no sample of it can be in more than size − 1 times.
        assert abs(counts[index] - CYCLES * repeats) <= 2 * size * repeats, (index, counts[index])


def test_within_a_group_the_order_of_draws_is_whole_epochs_one_after_another():
    group = [i for i, s in enumerate(SAMPLES) if (s.tokens, s.text_length) == (12, 256)]
    per_epoch = sum(POOL[i] for i in group)
    indices = [i for batch in batches(3, count=300) for i in batch if i in group]
    for start in range(0, len(indices) - per_epoch, per_epoch):
        assert Counter(indices[start : start + per_epoch]) == Counter({i: POOL[i] for i in group})


def test_the_order_is_a_function_of_samples_size_and_seed():
    assert batches(2) == batches(2)
    assert batches(2, seed=1) != batches(2)
    assert batches(2, samples=SAMPLES[:-1]) != batches(2)


@pytest.mark.parametrize("start", [1, 7, 58])
def test_going_on_after_any_number_of_batches_gives_the_same_rest(start):
    assert list(islice(batch_order(SAMPLES, 2, 0), start, start + 50)) == batches(2)[start : start + 50]


def test_a_single_sample_fills_a_batch_with_itself():
    assert batches(3, count=4, samples=SAMPLES[:1]) == [(0, 0, 0)] * 4


def test_skipping_is_taking_them_and_asks_for_cancel():
    order, calls = batch_order(SAMPLES, 2, 7), []
    skip_batches(order, 25_000, lambda: calls.append(1))
    assert len(calls) == 3 and next(order) == batches(2, 7, 25_001)[-1]

    def cancel():
        calls.append(1)
        if len(calls) == 5:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        skip_batches(order, 10**12, cancel)


RARE = [Sample(f"r{i}", (1, 1, 9 + i), 9 + i, 256, lambda *_: None) for i in range(8)]
USUAL = [Sample(f"u{i}", (1, 4, 8), 32, 256, lambda *_: None) for i in range(16)]


def test_batches_of_rare_shapes_are_spread_over_the_epochs():
    samples = [*USUAL, *RARE]
    order = batches(4, count=6 * 100, samples=samples)
    rare = [order.index((index,) * 4) for index in range(16, 24)]
    # Two of the eight come in each of the first four epochs, of four usual batches each.
    assert sorted(sum(max(batch) < 16 for batch in order[:place]) // 4 for place in rare) == [0, 0, 1, 1, 2, 2, 3, 3]
    counts = Counter(i for batch in order for i in batch)
    assert all(abs(counts[index] - 100) <= 4 for index in range(24))


def test_a_shape_with_as_many_showings_as_a_batch_is_not_rare():
    samples = [*RARE[:3], *(Sample(f"s{i}", (1, 4, 8), 32, 256, lambda *_: None) for i in range(4))]
    order = [batch for batch in batches(4, count=40, samples=samples) if min(batch) >= 3]
    assert all(sorted(batch) == [3, 4, 5, 6] for batch in order) and len(order) > 10


def test_pictures_of_rare_shapes_and_caption_lengths_are_named_with_what_helps():
    long = Sample("long caption", (1, 4, 8), 32, 512, lambda *_: None)
    (note,) = rare_notes(4, [*USUAL, *RARE[:1], long])
    assert note == (
        "Few pictures share a shape and caption length with these, so each step with them shows them several times and "
        "the next one comes up to 4 epochs later: r0, long caption; lower max_graphs or add pictures of their "
        "shape, make their captions about as long as the others, or set batch_size to 1."
    )
    (note,) = rare_notes(4, [*USUAL, long])
    assert "max_graphs" not in note and "captions about as long" in note
    assert not list(rare_notes(1, [*USUAL, *RARE])) and not list(rare_notes(4, USUAL[:1]))

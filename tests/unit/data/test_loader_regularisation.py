"""Regularisation samples take every second showing, whatever their number, and each comes as often as its repeats."""

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
from tessera.data.loader import batch_order
from tessera.data.samples import Sample, check_training_samples, shown_per_epoch


def make(training, regularisation):
    """Samples with these repeats each, of one shape."""

    def make_sample(name, repeats, is_regularisation):
        return Sample(name, (1, 4, 4), 16, 256, lambda *_: None, repeats, regularisation=is_regularisation)

    return [
        *(make_sample(f"t{i}", n, False) for i, n in enumerate(training)),
        *(make_sample(f"r{i}", n, True) for i, n in enumerate(regularisation)),
    ]


def draw_names(samples, count, seed=0, size=1):
    return [samples[i].name for batch in islice(batch_order(samples, size, seed), count) for i in batch]


@pytest.mark.parametrize("regularisation", [[1], [1, 1, 2], [1] * 40])
def test_an_epoch_shows_as_many_of_them_as_of_all_others(regularisation):
    samples = make([2, 1, 3], regularisation)
    assert shown_per_epoch(samples) == 12
    names = draw_names(samples, 12 * 10)
    for start in range(0, len(names), 12):
        epoch = Counter(names[start : start + 12])
        assert {name: epoch[name] for name in ("t0", "t1", "t2")} == {"t0": 2, "t1": 1, "t2": 3}


def test_each_comes_as_often_as_its_repeats_and_none_is_left_out_where_they_are_many():
    few_samples, many_samples = make([4], [1, 2]), make([4], [1] * 40)
    names = [name for name in draw_names(few_samples, 8 * 30) if name[0] == "r"]
    assert Counter(names) == {"r0": 40, "r1": 80}
    names = [name for name in draw_names(many_samples, 8 * 20) if name[0] == "r"]
    assert Counter(names) == {f"r{i}": 2 for i in range(40)}
    assert sorted(names[:40]) == sorted(names[40:]) and names[:40] != names[40:]  # two turns, in two orders


def test_the_order_is_a_function_of_the_seed_and_without_them_it_is_that_of_before():
    samples = make([2, 1, 3], [1, 1])
    assert draw_names(samples, 50, seed=1) == draw_names(samples, 50, seed=1) != draw_names(samples, 50, seed=2)
    assert draw_names(samples, 25, size=2) == draw_names(samples, 50)
    plain = make([2, 1, 3], [])
    assert shown_per_epoch(plain) == 6
    # Written down from the order that runs had before there were any, so that their states go on alike.
    assert draw_names(plain, 12, seed=7) == "t1 t2 t0 t2 t2 t0 t0 t0 t2 t2 t2 t1".split()


def test_regularisation_alone_is_refused():
    samples = make([1], [1])
    check_training_samples(sample.regularisation for sample in samples)
    with pytest.raises(ValueError, match="there is nothing to learn; chain a folder with regularisation off"):
        check_training_samples(replace(sample, regularisation=True).regularisation for sample in samples)

"""Forms of a sample: each is shown as often as it should be, and a function of the seed and the step alone."""

from collections import Counter
from itertools import product

import pytest
from scipy.stats import binomtest, chisquare
from tessera.data.loader import choose_variant
from tessera.data.samples import FIRST_VARIANT, Sample, SampleVariant

DRAWS = 4000


def sample(**changes):
    return Sample("a", (1, 2, 2), 4, 16, lambda *_: None, **changes)


def draw_choices(item, seed=5, batch=2):
    """The choices of the first steps, for each place of a batch of two."""
    return [choose_variant(item, seed, (step, 0), place) for step in range(DRAWS // batch) for place in range(batch)]


def captions(**changes):
    return Counter(choice.caption for choice in draw_choices(sample(**changes)))


def test_a_sample_of_one_form_is_shown_as_it_is():
    assert choose_variant(sample(), 5, (3, 0), 1) is FIRST_VARIANT
    assert choose_variant(sample(caption_weights=(1.0,)), 5, (3, 0), 1) is FIRST_VARIANT


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), (0.1,) * 10, (0.25, 0.5, 0.25)])
def test_each_form_of_a_caption_is_shown_as_often_as_its_weight_says(weights):
    frequencies = captions(caption_variants=len(weights), caption_weights=weights)
    counts = [frequencies[index] for index in range(len(weights))]
    assert sum(counts) == DRAWS and chisquare(counts, [weight * DRAWS for weight in weights]).pvalue > 0.001


def test_forms_without_weights_are_alike():
    frequencies = captions(caption_variants=4)
    assert chisquare([frequencies[index] for index in range(4)]).pvalue > 0.001 and frequencies.total() == DRAWS


@pytest.mark.parametrize("dropout", [0.05, 0.1, 0.5, 1.0])
def test_the_empty_prompt_is_shown_as_often_as_dropout_says_whatever_the_other_forms(dropout):
    for forms in ({}, {"caption_variants": 2, "caption_weights": (0.75, 0.25)}):
        frequencies = captions(caption_dropout=dropout, **forms)
        assert binomtest(frequencies[None], DRAWS, dropout).pvalue > 0.001
        if forms and dropout < 1:
            assert binomtest(frequencies[1], frequencies[0] + frequencies[1], 0.25).pvalue > 0.001


def test_each_place_of_each_micro_batch_has_its_caption_dropped_by_itself():
    item, keys = sample(caption_dropout=0.5), [(micro, place) for micro in (0, 1) for place in (0, 1)]
    empty = Counter(
        tuple(choose_variant(item, 5, (step, micro), place).caption is None for micro, place in keys)
        for step in range(DRAWS // 4)
    )
    assert chisquare([empty[pattern] for pattern in product((False, True), repeat=4)]).pvalue > 0.001


@pytest.mark.parametrize("form", ["image", "caption"])
def test_each_place_of_each_micro_batch_has_its_picture_and_caption_drawn_by_itself(form):
    item, keys = sample(**{f"{form}_variants": 2}), [(micro, place) for micro in (0, 1) for place in (0, 1)]
    frequencies = Counter(
        tuple(getattr(choose_variant(item, 5, (step, micro), place), form) for micro, place in keys)
        for step in range(DRAWS // 4)
    )
    assert chisquare([frequencies[pattern] for pattern in product((0, 1), repeat=4)]).pvalue > 0.001


def test_picture_and_caption_are_drawn_apart():
    frequencies = Counter(draw_choices(sample(image_variants=2, caption_variants=2, caption_weights=(0.5, 0.5))))
    counts = [frequencies[SampleVariant(picture, caption)] for picture in (0, 1) for caption in (0, 1)]
    assert chisquare(counts).pvalue > 0.001 and sum(counts) == DRAWS


def test_choices_are_a_function_of_seed_step_and_place():
    item = sample(caption_variants=50, caption_dropout=0.2)
    assert draw_choices(item) == draw_choices(item) != draw_choices(item, seed=6)
    assert choose_variant(item, 5, (700, 0), 1) == draw_choices(item)[1401]
    # Every epoch draws anew, and so does every place.
    assert len({choose_variant(item, 5, (step, 0), 0) for step in range(40)}) > 15
    assert len({choose_variant(item, 5, (0, micro), place) for micro in range(8) for place in range(8)}) > 15

"""Captions of Wan take 512 tokens, whatever they are."""

import tiny
import torch
from family_cases import CASES
from tessera.models.family import SampleFacts
from tessera.models.model_patches import trainable_model
from tessera.models.registry import family_of
from tiny.models.family_case import noisy


def captions(*lengths):
    """Samples with captions of these lengths."""
    return [SampleFacts("a.png", 1, (), 0, frozenset(), length) for length in lengths]


def test_captions_take_512_tokens_and_longer_ones_are_cut_with_a_word(case_file):
    case = CASES["wan-2.1-t2v"]
    model = case.load(case_file(case))
    family = family_of(model)
    assert {family.text_length(model.model, length) for length in (3, 512, 700)} == {512}
    assert family.notes(model.model, captions(512, 40)) == []
    (note,) = family.notes(model.model, captions(512, 513, 700))
    assert "2 captions have more than 512 tokens" in note
    samples = [tiny.wan_sample(f"{length}", (1, 2, 2), text=length, text_length=512) for length in (5, 600)]
    patcher, _ = trainable_model(model)
    made = family.inputs(patcher, [noisy(s) for s in samples], torch.tensor([0.5, 0.5]), 1.0)
    assert made.text.shape[:2] == (2, 512) and made.text[0, 5:].abs().max() == 0
    assert torch.equal(made.text[1], samples[1].load().text[0, :512])

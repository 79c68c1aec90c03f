"""Captions of Wan take 512 tokens, and longer ones are neither cut nor do their pads count."""

import tiny
import torch
from family_cases import CASES
from tessera.models.catalogue.registry import family_of
from tessera.models.family import SampleFacts
from tessera.models.model_patches import trainable_model
from tessera.models.wan.family import Wan
from tessera.train.preflight.notes import masked_text_notes
from tiny.models.family_case import noisy


def captions(*lengths):
    """Samples with captions of these lengths."""
    return [SampleFacts("a.png", 1, (), 0, frozenset(), length) for length in lengths]


def test_captions_take_512_tokens_and_longer_ones_are_whole(case_file):
    case = CASES["wan-2.1-t2v"]
    model = case.load(case_file(case))
    family = family_of(model)
    assert [family.conditioning.text_length(model.model, length) for length in (3, 512, 700)] == [512, 512, 768]
    assert family.notes(model.model, captions(512, 40)) == []
    (note,) = family.notes(model.model, captions(512, 513, 700))
    assert "2 captions have more than 512 tokens" in note
    samples = [tiny.wan_sample(f"{length}", (1, 2, 2), text=length, text_length=768) for length in (5, 600)]
    patcher, _ = trainable_model(model)
    batch = family.forward.inputs(patcher, [noisy(s) for s in samples], torch.tensor([0.5, 0.5]), 1.0)
    assert batch.text.shape[:2] == (2, 768) and batch.text[0, 5:].abs().max() == 0
    assert torch.equal(batch.text[1, :600], samples[1].load().text[0])
    assert batch.text_mask.sum(dim=1).tolist() == [512, 600]


def test_an_attention_that_takes_no_mask_is_named_with_the_captions_that_need_one():
    family = Wan()
    samples = [tiny.wan_sample(f"{length}", (1, 2, 2), text=length, text_length=length) for length in (512, 768)]
    (note,) = masked_text_notes("cudnn", family, samples)
    assert note == "attention is 'cudnn', which takes no mask, so PyTorch's runs in its place for long captions: 768."
    assert not list(masked_text_notes("cudnn", family, samples[:1])) + list(masked_text_notes("auto", family, samples))

"""LTX-2.5 trains by name, on a class of ours that does what its stored sources do."""

from unittest.mock import patch

import pytest
from tessera.models.catalogue.registry import family_of
from tessera.models.native.facts.lookup import named_facts
from tiny.native import build, data_of
from tiny.native.rows import ltx25
from tiny.native.step import difference, trainer_of, written_out
from tiny.train.reference_gradients import lora_gradients
from tiny.train.runs import Watcher, train
from tiny.train.training import fill_up_matrices, micro_batch

BOUND = 3e-5  # as in test_every_model.py


@pytest.fixture(autouse=True)
def newer():
    with ltx25.newer_comfyui():
        yield


def test_the_marker_tells_it_from_ltx_2_whose_class_it_has():
    patcher = build(ltx25.ROW)
    model, family = patcher.model, family_of(patcher)
    facts = named_facts(model)
    with patch.dict(model.model_config.unet_config, use_keyframes_abs_pos_embedding=False):
        ltx_2 = named_facts(model)
    assert (family.title, facts.name, ltx_2.name) == ("LTX-2.5", "ltx-2.5", "ltx-2")
    assert type(model).__name__ == "LTXAV" and not family.tested_by_name
    assert (facts.default_targets, facts.sound, facts.batches) == (ltx_2.default_targets, ltx_2.sound, False)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_every_target_has_the_gradient_of_plain_autograd(mode, tmp_path):
    trainer = trainer_of(ltx25.ROW, tmp_path, mode)
    fill_up_matrices(trainer)
    expected_loss, expected = written_out(ltx25.ROW, trainer)
    loss = trainer.train_step.forward_backward([micro_batch(0)])
    assert abs(loss - expected_loss) <= BOUND * expected_loss
    assert difference(lora_gradients(trainer), expected) <= BOUND
    trainer.close()


def test_a_run_gets_a_certificate_and_says_what_it_leaves_out(tmp_path):
    watcher = Watcher()
    result = train(build(ltx25.ROW), data_of(ltx25.ROW), tmp_path, watcher, steps=1, memory={"verify": "auto"})
    assert result.summary["certificate"]["text"].startswith("LTX-2.5: forward equal, gradients within")
    assert result.summary["final_file"]["layers_loaded"] == result.summary["targets"] > 0
    notes = " ".join(watcher.notes)
    assert "without their sound" in notes and "LTX-2.5 is distilled" in notes and "licence" in notes

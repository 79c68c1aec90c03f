"""Models that hand q, k and v to attention in containers, as ComfyUI's do since 0.32, train as they did before."""

from collections.abc import Iterator

import pytest
import torch
from tessera.models.catalogue import registry
from tiny.native import TRAINED
from tiny.native.containers import Container, containers
from tiny.native.step import batch_of, difference, trainer_of, written_out
from tiny.train.reference_gradients import lora_gradients
from tiny.train.training import fill_up_matrices, micro_batch

BOUND = 3e-5  # as in test_every_model.py


@pytest.fixture(scope="module")
def in_containers() -> Iterator[int]:
    with pytest.MonkeyPatch.context() as patch, containers() as calls:
        patch.setattr(registry, "FAMILIES", ())
        yield calls


def test_each_call_of_attention_hands_containers_over(in_containers):
    assert in_containers >= 60


@pytest.mark.parametrize("row", TRAINED, ids=str)
def test_forward_and_gradients_are_those_of_core_s_forward_on_containers(row, tmp_path, in_containers):
    trainer = trainer_of(row, tmp_path)
    opened = Container.opened
    with torch.no_grad():
        trainer.placed.check_forward(batch_of(trainer).inputs)
    fill_up_matrices(trainer)
    expected = written_out(row, trainer)
    loss = trainer.train_step.forward_backward([micro_batch(0)])
    assert abs(loss - expected[0]) <= BOUND * expected[0]
    assert difference(lora_gradients(trainer), expected[1]) <= BOUND
    assert Container.opened > opened, "no container was opened"
    trainer.close()


def test_a_compiled_block_opens_them_within_its_graph(tmp_path, in_containers):
    row = next(row for row in TRAINED if row.name == "minimax-h3")
    torch._dynamo.reset()
    results = []
    for name, backend in (("eager", None), ("compiled", "aot_eager")):
        trainer = trainer_of(row, tmp_path / name, "full", backend=backend)
        fill_up_matrices(trainer)
        results.append((trainer.train_step.forward_backward([micro_batch(0)]), lora_gradients(trainer)))
        runner = trainer.placed.execution.runner
        trainer.close()
    assert runner.report.counts().graphs == runner.planned_graphs > 0 and not runner.failed
    assert abs(results[1][0] - results[0][0]) <= BOUND * results[0][0]
    assert difference(results[1][1], results[0][1]) <= BOUND
    torch._dynamo.reset()


def test_a_container_of_another_kind_is_named_with_the_version_of_comfyui(tmp_path, in_containers, monkeypatch):
    row = next(row for row in TRAINED if row.name == "minimax-h3")
    monkeypatch.delattr(Container, "take")
    trainer = trainer_of(row, tmp_path)
    with pytest.raises(ValueError, match=r"optimized_attention of ComfyUI [\d.]+ in a way .*its q is a Container"):
        trainer.train_step.forward_backward([micro_batch(0)])
    trainer.close()

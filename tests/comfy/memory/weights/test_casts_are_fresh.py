"""The casts that a forward in bf16 reads are those of the master weights as they are, whoever changed these."""

from typing import Any

import pytest
import tiny
import torch
from family_cases import CASES
from tessera.train.checkpoint.state import TrainingState
from tessera.train.optim.options import OptimizerOptions
from tessera.train.optim.state_dict import pack_state, unpack_state
from tiny.models.family_case import computing_in
from tiny.native import NAMED
from tiny.native.step import trainer_of
from tiny.train.runs import training_data

CASE, STEPS = CASES["flux-dev"], 3


def loss_with_and_without_casts(trainer: Any) -> tuple[float, float]:
    """The loss of a step, and the same where each forward casts the master weights by itself."""
    casts_by_name = {name: adapter.casts for name, adapter in trainer.network.adapters.items()}
    assert all(casts.keys() == {"down", "up"} for casts in casts_by_name.values())
    actual = trainer.train_step.forward_backward([tiny.micro_batch(0)]).item()
    for adapter in trainer.network.adapters.values():
        adapter.casts = {}
    expected = trainer.train_step.forward_backward([tiny.micro_batch(0)]).item()
    for name, adapter in trainer.network.adapters.items():
        adapter.casts = casts_by_name[name]
    return actual, expected


class Checks:
    """Compares before the first step and after each."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.losses = trainer, list[float]()

    def is_due(self, step: int, steps: int) -> bool:
        return True

    def between_steps(self, run: Any) -> None:
        actual, expected = loss_with_and_without_casts(self.trainer)
        assert actual == expected
        self.losses.append(actual)

    def summary(self, trainer: Any) -> dict[str, Any]:
        return {}


@pytest.fixture
def trainer(case_file: Any, tmp_path: Any) -> Any:
    dtype = torch.bfloat16
    model = computing_in(CASE.load(case_file(CASE, dtype=dtype)), dtype)
    data = training_data(*CASE.batches()["shapes"]())
    options = OptimizerOptions(learning_rate=0.05, ema_decay=0.9)
    instance = tiny.make_trainer(model, data, tmp_path, steps=STEPS, optimizer=options)
    tiny.fill_up_matrices(instance)
    instance.train_step.batches.reader.prefetch(tiny.micro_batch(0))
    yield instance
    instance.close()


def test_after_steps_loads_and_swaps(trainer):
    checks = Checks(trainer)
    trainer.watchers.append(checks)
    snapshot = unpack_state(*pack_state(trainer.learner.state()))
    trainer.run()
    assert len(set(checks.losses)) == STEPS + 1
    with trainer.learner.as_saved():
        actual, expected = loss_with_and_without_casts(trainer)
        assert actual == expected and actual != checks.losses[-1]
    assert loss_with_and_without_casts(trainer) == (checks.losses[-1],) * 2
    with trainer.network.switched_off():
        assert all(not group.cast.any() for group in trainer.network.flat)  # for a forward that does not write them
        actual, expected = loss_with_and_without_casts(trainer)
        assert actual == expected and actual not in checks.losses
    state = TrainingState(step=0, batches=0, loss=[], lineage="", environment={}, parts=[], **snapshot)
    trainer.learner.load(state)
    trainer.progress.step = 0  # whose noise was that of the first loss
    assert loss_with_and_without_casts(trainer) == (checks.losses[0],) * 2


@pytest.mark.parametrize("batch_size", [1, 2])
def test_none_are_kept_where_samples_run_through_the_blocks_one_after_another(batch_size: int, tmp_path: Any) -> None:
    """As ComfyUI's own forward runs those of other sizes: autograd would sum the gradients of a cast in bf16."""
    (row,) = (row for row in NAMED if str(row) == "z-image")
    trainer = trainer_of(row, tmp_path, batch_size=batch_size)
    assert (trainer.network.casts_in(torch.bfloat16) is None) == (batch_size > 1)

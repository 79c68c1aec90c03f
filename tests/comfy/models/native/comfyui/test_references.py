"""Krea 2 with reference pictures beside the noisy latent, of which its blocks see one sequence."""

from dataclasses import replace

import pytest
from tiny.native import NAMED
from tiny.native.step import difference, trainer_of, written_out
from tiny.train.reference_gradients import lora_gradients
from tiny.train.training import fill_up_matrices, micro_batch

KREA_2 = next(row for row in NAMED if row.name == "krea-2")


def with_references(count, method):
    """The row with pictures beside it, which the model reads where a method is named."""
    return lambda draw: {
        "reference_latents": [draw(1, 16, 1, 4, 6) for _ in range(count)],
        "reference_latents_method": method,
    }


@pytest.mark.parametrize(("count", "method"), [(1, "index"), (2, "index_timestep_zero")])
def test_krea_2_with_references_has_the_gradients_of_plain_autograd(count, method, tmp_path):
    row = replace(KREA_2, conditioning=with_references(count, method))
    expected = None
    for mode, swapped in (("none", 0), ("full", 2)):
        trainer = trainer_of(row, tmp_path / mode, mode, blocks_to_swap=swapped)
        fill_up_matrices(trainer)
        expected = expected or written_out(row, trainer)
        loss = float(trainer.train_step.forward_backward([micro_batch(0)]))
        assert loss == pytest.approx(expected[0], rel=3e-5)
        assert difference(lora_gradients(trainer), expected[1]) <= 3e-5, mode
        trainer.close()

"""Every tiny model that trains has, on ComfyUI's own forward, the gradients of plain autograd over that forward."""

import pytest
import torch
from tessera.models.catalogue import registry
from thinned import one_in
from tiny.compile.compiling import Graphs
from tiny.native import NAMED, TRAINED, build
from tiny.native.reference import plain_output, raw_output, tokens
from tiny.native.step import batch_of, difference, guidance_of, trainer_of, written_out
from tiny.train.reference_gradients import lora_gradients
from tiny.train.training import fill_up_matrices, micro_batch

# In fp32 the order of sums makes up to 1.5e-6 of a matrix's gradient; an attention scale that is 1 % off makes 1.1e-2
# in the model that feels it least.
BOUND = 3e-5


@pytest.fixture(autouse=True)
def no_family_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLUX, Qwen-Image and Wan run ComfyUI's forward here too."""
    monkeypatch.setattr(registry, "FAMILIES", ())


# In containers, as newer ComfyUIs hand q, k and v over, every row is compared in test_containers.py.
@pytest.mark.parametrize("row", one_in(4, TRAINED), ids=str)
def test_the_forward_is_core_s_own(row, tmp_path):
    trainer = trainer_of(row, tmp_path)
    batch, sample = batch_of(trainer), trainer.context.data.samples[0]
    with torch.no_grad():
        actual = trainer.placed.velocity(batch.inputs, (0, 0))[0]
        (group,) = batch.inputs.groups
        model = plain_output(build(row))
        guidance = guidance_of(trainer)
        expected = tokens(raw_output(model, row, sample, group.x[0].clone(), group.sigma, guidance)[0], sample.tokens)
    assert float((actual - expected).norm()) <= BOUND * float(expected.norm())


@pytest.mark.parametrize(
    ("row", "mode"), [*((row, "full") for row in TRAINED), *one_in(4, [(row, "none") for row in TRAINED])], ids=str
)
def test_every_target_has_the_gradient_of_plain_autograd(row, mode, tmp_path):
    trainer = trainer_of(row, tmp_path, mode)
    fill_up_matrices(trainer)
    expected_loss, expected = written_out(row, trainer)
    loss = trainer.train_step.forward_backward([micro_batch(0)])
    assert abs(loss - expected_loss) <= BOUND * expected_loss
    assert difference(lora_gradients(trainer), expected) <= BOUND
    trainer.close()


@pytest.mark.parametrize("row", one_in(4, TRAINED), ids=str)
def test_a_step_leaves_nothing_for_the_next(row, tmp_path):
    """A second step on one caption with another LoRA gives what a fresh model gives."""
    used, fresh = (trainer_of(row, tmp_path / name) for name in ("used", "fresh"))
    fill_up_matrices(used)
    used.train_step.forward_backward([micro_batch(0)])
    results = []
    for trainer in (used, fresh):
        fill_up_matrices(trainer, 0.2)
        results.append((trainer.train_step.forward_backward([micro_batch(0)]), lora_gradients(trainer)))
        trainer.close()
    (loss, expected), (other, gradients) = results
    assert loss == other and all(torch.equal(gradients[name], value) for name, value in expected.items())


@pytest.mark.parametrize("row", one_in(2, NAMED), ids=str)
def test_swapped_blocks_give_the_same_gradients(row, tmp_path):
    resident, swapped = (trainer_of(row, tmp_path / f"{n}", "full", blocks_to_swap=n) for n in (0, 2))
    assert swapped.placed.weights.swap is not None
    results = []
    for trainer in (resident, swapped):
        fill_up_matrices(trainer)
        results.append((trainer.train_step.forward_backward([micro_batch(0)]), lora_gradients(trainer)))
        trainer.close()
    (loss, expected), (other, gradients) = results
    assert loss == other and all(torch.equal(gradients[name], value) for name, value in expected.items())


@pytest.mark.parametrize("row", one_in(6, NAMED[::2]), ids=str)  # half a minute each
def test_compiled_blocks_are_no_more_graphs_than_planned_and_give_the_same_gradients(row, tmp_path):
    torch._dynamo.reset()
    plain = trainer_of(row, tmp_path / "plain")
    fill_up_matrices(plain)
    expected = plain.train_step.forward_backward([micro_batch(0)]), lora_gradients(plain)
    plain.close()
    graphs = Graphs()
    trainer = trainer_of(row, tmp_path / "compiled", backend="aot_eager")
    fill_up_matrices(trainer)
    loss = trainer.train_step.forward_backward([micro_batch(0)])
    first = graphs()
    assert 0 < first <= trainer.placed.execution.runner.planned_graphs
    assert graphs.breaks == 0 and not trainer.placed.execution.runner.failed
    assert abs(loss - expected[0]) <= BOUND * expected[0]
    assert difference(lora_gradients(trainer), expected[1]) <= BOUND
    trainer.train_step.forward_backward([micro_batch(0)])
    assert graphs() == first, "the second step compiled again"
    trainer.close()
    torch._dynamo.reset()

"""A mask within a run: what it leaves out has exactly no effect on a gradient; the loss is the mean over the rest."""

from dataclasses import replace

import pytest
import tiny
import torch
from tessera.data.samples import SampleTensors
from tessera.train.objective.options import ObjectiveOptions
from tiny.train.runs import sample, train, training_data


def masked(item, weights):
    """The sample with these weights of its tokens."""
    read = item.load()
    tensors = SampleTensors(read.latent, read.text, read.conditioning, weights)
    return replace(item, load=lambda *_: tensors)


def half_masked():
    """Two pictures of 16 tokens: of the first the last 8 are masked out, the second is whole."""
    weights = torch.tensor([0.25, 1.0] * 4 + [0.0] * 8)
    return masked(sample("a", 4, 4), weights), sample("b", 2, 8)


def gradients(model, folder, change, **settings):
    """The loss and the gradients of one step over both, with the batch changed by `change`."""
    from tessera.train.step import batches

    trainer = tiny.make_trainer(model, training_data(*half_masked()), folder, batch_size=2, **settings)
    tiny.fill_up_matrices(trainer)
    original = batches.make_batch

    def changed(*args):
        batch = original(*args)
        change(batch)
        return batch

    batches.make_batch = changed
    try:
        loss = trainer.train_step.forward_backward([tiny.micro_batch(0, 1)])
    finally:
        batches.make_batch = original
    gradients_by_name = {name: p.grad.clone() for name, pair in trainer.network.pairs.items() for p in pair[1:]}
    trainer.close()
    return loss, gradients_by_name


@pytest.mark.parametrize("loss", ["mse", "l1", "huber", "pseudo_huber"])
def test_the_target_of_masked_tokens_has_exactly_no_effect(loss, tiny_flux, tmp_path):
    settings = {"objective": ObjectiveOptions(loss=loss)}

    def elsewhere(batch):
        batch.target[0, 8:] += 100 * torch.randn(8, batch.target.shape[2], generator=torch.Generator().manual_seed(1))

    def inside(batch):
        batch.target[0, 0] += 1

    plain = gradients(tiny_flux, tmp_path / "a", lambda batch: None, **settings)
    other = gradients(tiny_flux, tmp_path / "b", elsewhere, **settings)
    assert plain[0] == other[0]
    assert all(torch.equal(plain[1][name], other[1][name]) for name in plain[1])
    counted = gradients(tiny_flux, tmp_path / "c", inside, **settings)
    assert counted[0] != plain[0]
    assert not all(torch.equal(plain[1][name], counted[1][name]) for name in plain[1])


def test_the_loss_is_the_weighted_mean_over_the_tokens_of_each_picture(tiny_flux, tmp_path):
    captured = {}

    def keep(batch):
        captured["batch"] = batch

    actual, _ = gradients(tiny_flux, tmp_path / "a", keep)
    batch = captured["batch"]
    trainer = tiny.make_trainer(tiny_flux, training_data(*half_masked()), tmp_path / "b", batch_size=2)
    tiny.fill_up_matrices(trainer)
    with torch.no_grad():
        error = (trainer.placed.velocity(batch.inputs, (0, 0)) - batch.target).double().square().mean(dim=2)
    first = sum(w * float(e) for w, e in zip([0.25, 1.0] * 4, error[0], strict=False)) / 5.0
    assert actual == pytest.approx((first + float(error[1].mean())) / 2, rel=1e-5)
    trainer.close()


def test_a_masked_run_learns(tiny_flux, tmp_path):
    item, _ = half_masked()
    result = train(tiny_flux, training_data(item), tmp_path, steps=2)
    assert len(result.loss) == 2

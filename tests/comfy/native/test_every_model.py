"""Every tiny model that trains has, on ComfyUI's own forward, the gradients of plain autograd over that forward."""

from typing import Any

import pytest
import torch
from tessera.data.samples import FIRST_VARIANT
from tessera.models import registry
from tessera.train.batch import make_batch
from tessera.train.settings import MemoryOptions
from tiny.compiling import Graphs
from tiny.native import NAMED, TRAINED, build, data_of
from tiny.native.reference import plain_model, raw_output, tokens, training, with_lora
from tiny.reference_gradients import gradient, lora_gradients
from tiny.training import fill_up_matrices, make_trainer, shown

# fp32: the sines of a timestep, whose arguments reach 1000, alone move an output by 1e-5.
OUTPUT, GRADIENT = 1e-4, 3e-3
# Traced forward and backward; of the others dynamo's graphs are looked at alone, which is quicker.
AOT = {"z-image", "krea-2"}


@pytest.fixture(autouse=True)
def no_family_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLUX, Qwen-Image and Wan run ComfyUI's forward here too."""
    monkeypatch.setattr(registry, "FAMILIES", ())


def _trainer(row: Any, folder: Any, mode: str = "none", **changes: Any) -> Any:
    memory = MemoryOptions(checkpointing=mode, blocks_to_swap=changes.pop("blocks_to_swap", 0))
    settings = {"memory": memory, "compile": "off", "steps": 2} | changes
    backend = settings.pop("backend", None)
    if backend:
        settings.pop("compile")
    return make_trainer(build(row), data_of(row), folder, backend=backend, **settings)


def _batch(trainer: Any) -> Any:
    """The first micro-batch, which holds the first sample."""
    sample = trainer.data.samples[0]
    given = [(sample, sample.load(FIRST_VARIANT))]
    settings = trainer.settings
    return make_batch(
        trainer.patcher,
        trainer.family,
        given,
        settings.objective,
        trainer.device,
        settings.seed,
        (0, 0),
        trainer.strata,
    )


def _guidance(trainer: Any) -> float | None:
    """That of the objective, where it was distilled into the model; else the model keeps what core gives it."""
    return trainer.settings.objective.guidance if trainer.family.takes_guidance(trainer.patcher.model) else None


def _written_out(row: Any, trainer: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the first sample and the LoRA's gradients, by plain autograd over ComfyUI's own forward."""
    batch, sample = _batch(trainer), trainer.data.samples[0]
    (group,) = batch.inputs.groups
    scale = trainer.settings.network.alpha / trainer.settings.network.rank
    masters = {n: [p.detach().clone().requires_grad_() for p in pair] for n, pair in trainer.network.pairs.items()}
    lora = {name: (*pair, scale) for name, pair in masters.items()}
    model = plain_model(row)
    with torch.autograd.graph.allow_mutation_on_saved_tensors(), training(), with_lora(model, lora):
        out = raw_output(model, row, sample, group.x[0].clone(), group.sigma, _guidance(trainer))
        loss = (tokens(out[0], sample.tokens) - batch.target[0]).square().mean()
        loss.backward()
    gradients = {
        f"{n}.{side}": gradient(p) for n, pair in masters.items() for side, p in zip(("down", "up"), pair, strict=True)
    }
    return float(loss.detach()), gradients


def _differs(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative error of one matrix, of those that the loss reaches."""
    assert found.keys() == wanted.keys()
    largest = max(float(value.norm()) for value in wanted.values())
    return max(
        float((found[name] - value).norm()) / max(float(value.norm()), 1e-4 * largest) for name, value in wanted.items()
    )


@pytest.mark.parametrize("row", TRAINED, ids=str)
def test_the_forward_is_core_s_own(row, tmp_path):
    trainer = _trainer(row, tmp_path)
    batch, sample = _batch(trainer), trainer.data.samples[0]
    with torch.no_grad():
        found = trainer.placed.velocity(batch.inputs, (0, 0))[0]
        (group,) = batch.inputs.groups
        model = build(row).model
        vars(model.model_sampling)["calculate_denoised"] = lambda sigma, output, x: output
        guidance = _guidance(trainer)
        wanted = tokens(raw_output(model, row, sample, group.x[0].clone(), group.sigma, guidance)[0], sample.tokens)
    assert float((found - wanted).norm()) <= OUTPUT * float(wanted.norm())


@pytest.mark.parametrize("row", TRAINED, ids=str)
def test_every_target_has_the_gradient_of_plain_autograd(row, tmp_path):
    wanted = None
    for mode in ("none", "full"):
        trainer = _trainer(row, tmp_path / mode, mode)
        fill_up_matrices(trainer)
        wanted = wanted or _written_out(row, trainer)
        loss = trainer.forward_backward([shown(0)])
        assert abs(loss - wanted[0]) <= GRADIENT * wanted[0]
        error = _differs(lora_gradients(trainer), wanted[1])
        assert error <= GRADIENT, (mode, error)
        trainer.close()


@pytest.mark.parametrize("row", TRAINED, ids=str)
def test_nothing_of_a_step_is_left_for_the_next(row, tmp_path):
    """A second step on one caption with another LoRA gives what a fresh model gives."""
    used, fresh = (_trainer(row, tmp_path / name) for name in ("used", "fresh"))
    fill_up_matrices(used)
    used.forward_backward([shown(0)])
    found = []
    for trainer in (used, fresh):
        fill_up_matrices(trainer, 0.2)
        found.append((trainer.forward_backward([shown(0)]), lora_gradients(trainer)))
        trainer.close()
    (loss, wanted), (other, gradients) = found
    assert loss == other and all(torch.equal(gradients[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("row", NAMED, ids=str)
def test_swapped_blocks_give_the_same_gradients(row, tmp_path):
    resident, swapped = (_trainer(row, tmp_path / f"{n}", "full", blocks_to_swap=n) for n in (0, 2))
    assert swapped.placed.swap is not None
    found = []
    for trainer in (resident, swapped):
        fill_up_matrices(trainer)
        found.append((trainer.forward_backward([shown(0)]), lora_gradients(trainer)))
        trainer.close()
    (loss, wanted), (other, gradients) = found
    assert loss == other and all(torch.equal(gradients[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("row", NAMED, ids=str)
def test_compiled_blocks_are_no_more_graphs_than_planned_and_give_the_same_gradients(row, tmp_path):
    torch._dynamo.reset()
    plain = _trainer(row, tmp_path / "plain")
    fill_up_matrices(plain)
    wanted = plain.forward_backward([shown(0)]), lora_gradients(plain)
    plain.close()
    graphs, backend = Graphs(), "aot_eager" if row.name in AOT else "eager"
    trainer = _trainer(row, tmp_path / "compiled", backend=backend)
    fill_up_matrices(trainer)
    loss = trainer.forward_backward([shown(0)])
    first = graphs()
    assert 0 < first <= trainer.placed.runner.planned_graphs
    assert graphs.breaks == 0 and not trainer.placed.runner.failed
    assert abs(loss - wanted[0]) <= GRADIENT * wanted[0]
    assert _differs(lora_gradients(trainer), wanted[1]) <= GRADIENT
    trainer.forward_backward([shown(0)])
    assert graphs() == first, "the second step compiled again"
    trainer.close()
    torch._dynamo.reset()

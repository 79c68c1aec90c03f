"""One training step of a tiny model, and the same written out by plain autograd over ComfyUI's own forward."""

from pathlib import Path
from typing import Any

from torch import Tensor

from ..train.reference_gradients import gradient
from ..train.training import make_trainer
from .reference import plain_model, raw_output, tokens, training, with_lora, writing_allowed
from .row import NativeRow, build, data_of


def trainer_of(row: NativeRow, folder: Path, mode: str = "none", model: Any = None, **changes: Any) -> Any:
    """Make a Trainer of the row's MODEL, or of `model`.

    mode: checkpointing; changes: blocks_to_swap, backend to compile with, and fields of TrainSettings.
    """
    from tessera.train.config.settings import MemoryOptions

    memory = MemoryOptions(checkpointing=mode, blocks_to_swap=changes.pop("blocks_to_swap", 0))
    settings = {"memory": memory, "steps": 2} | changes
    return make_trainer(build(row) if model is None else model, data_of(row), folder, **settings)


def batch_of(trainer: Any, *indices: int) -> Any:
    """Make the first micro-batch, of these samples; the first one by default."""
    from tessera.data.samples import FIRST_VARIANT
    from tessera.train.objective.batch import make_batch

    samples, settings = [trainer.context.data.samples[index] for index in indices or (0,)], trainer.settings
    read = [(sample, sample.load(FIRST_VARIANT)) for sample in samples]
    model_and_family, objective = (trainer.context.patcher, trainer.context.family), settings.objective
    return make_batch(
        *model_and_family, read, objective, trainer.device, settings.seed, (0, 0), trainer.train_step.batches.strata
    )


def guidance_of(trainer: Any) -> float | None:
    """Return the guidance of the objective if it was distilled into the model; else the model keeps the guidance of
    core."""
    return (
        trainer.settings.objective.guidance
        if trainer.context.family.conditioning.takes_guidance(trainer.context.patcher.model)
        else None
    )


def written_out(row: NativeRow, trainer: Any, model: Any = None) -> tuple[float, dict[str, Tensor]]:
    """Compute the loss of the first sample and the LoRA's gradients.

    model: a BaseModel as `plain_model` makes it, the row's by default.
    """
    batch, sample = batch_of(trainer), trainer.context.data.samples[0]
    (group,) = batch.inputs.groups
    scale = trainer.settings.network.alpha / trainer.settings.network.rank
    masters = {n: [p.detach().clone().requires_grad_() for p in pair] for n, pair in trainer.network.pairs.items()}
    lora = {name: (*pair, scale) for name, pair in masters.items()}
    model = plain_model(build(row)) if model is None else model
    with writing_allowed(), training(), with_lora(model, lora):
        out = raw_output(model, row, sample, group.x[0].clone(), group.sigma, guidance_of(trainer))
        loss = (tokens(out[0], sample.tokens) - batch.target[0]).square().mean()
        loss.backward()
    gradients = {
        f"{n}.{side}": gradient(p) for n, pair in masters.items() for side, p in zip(("down", "up"), pair, strict=True)
    }
    return float(loss.detach()), gradients


def difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative error of one matrix, of those that the loss reaches."""
    assert actual.keys() == expected.keys()
    largest = max(float(value.norm()) for value in expected.values())
    return max(
        float((actual[name] - value).norm()) / max(float(value.norm()), 1e-4 * largest)
        for name, value in expected.items()
    )

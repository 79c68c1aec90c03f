"""The recipe of a run, written out once more in fp64 and compared number for number: micro-batches averaged, clipped by
max_grad_norm, stepped by momentum SGD along warm-up and cosine; the same in fp16 with its loss scaler."""

from math import cos, pi
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from family_cases import CASES
from safetensors.torch import load_file
from tessera.data.loader import batch_order
from tessera.lora.network import LoraNetwork
from tessera.lora.options import NetworkOptions
from tessera.train.checkpoint.state import state_path
from tessera.train.optim.options import OptimizerOptions
from tiny.models.family_case import computing_in
from tiny.train.reference_gradients import gradient, written_out_loss
from tiny.train.runs import training_data
from torch import Tensor

CASE = CASES["flux-dev"]
# The limit lies amid the norms, so that some steps are clipped and the others show what is under it.
STEPS = 5
ACCUMULATION = 2
RATE = 0.5
MOMENTUM = 0.9
LIMIT = 0.8
RATES = [RATE / 2, RATE, RATE, RATE * (1 + cos(pi / 3)) / 2, RATE * (1 + cos(2 * pi / 3)) / 2]
OPTIMIZER = OptimizerOptions(
    optimizer="custom",
    optimizer_class="torch.optim.SGD",
    optimizer_args=f"momentum={MOMENTUM}",
    learning_rate=RATE,
    lr_scheduler="cosine",
    warmup_steps=2,
    max_grad_norm=LIMIT,
)


class Recorder:
    """Watches a run: the LoRA before the first step and after each, and what is reported of each."""

    def __init__(self, trainer: Any) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.reports: list[Any] = []
        trainer.watchers.append(self)
        trainer.observer.step = self.reports.append

    def between_steps(self, run: Any) -> None:
        self.weights.append({name: p.detach().double() for name, p in run.placed.network.master_weights().items()})

    def is_due(self, step: int, steps: int) -> bool:
        return False


class Written(NamedTuple):
    weights: list[dict[str, Tensor]]
    losses: list[float]
    norms: list[float]


def trainer_of(file: Any, folder: Any, dtype: torch.dtype) -> Any:
    model = computing_in(CASE.load(file), dtype)
    data = training_data(*CASE.batches()["shapes"]())
    options = {"steps": STEPS, "gradient_accumulation": ACCUMULATION, "optimizer": OPTIMIZER}
    trainer = tiny.make_trainer(model, data, folder, **options)
    tiny.fill_up_matrices(trainer)
    return trainer


def written_out(trainer: Any, tensors: dict[str, Tensor]) -> Written:
    settings, samples = trainer.settings, trainer.context.data.samples
    lora, masters = tiny.reference_masters(trainer)
    momentum = {name: torch.zeros_like(p) for name, p in masters.items()}
    order = batch_order(samples, 1, settings.seed)
    weights = []
    losses = []
    norms = []

    def velocity(sample: Any, x_t: Tensor, sigma: float) -> Tensor:
        return CASE.reference_velocity(tensors, sample, x_t, sigma, settings.objective.guidance, lora)

    for step, rate in enumerate(RATES):
        micro_batches = [next(order) for _ in range(ACCUMULATION)]
        terms = [
            written_out_loss(CASE, settings, [samples[i] for i in indices], velocity, (step, micro))
            for micro, indices in enumerate(micro_batches)
        ]
        loss = torch.stack(terms).mean()
        loss.backward()
        norm = torch.cat([gradient(p).flatten() for p in masters.values()]).norm()
        for name, p in masters.items():
            momentum[name] = MOMENTUM * momentum[name] + gradient(p) * min(1.0, LIMIT / float(norm))
            p.data -= rate * momentum[name]
            p.grad = None
        weights.append({name: p.detach().clone() for name, p in masters.items()})
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return Written(weights, losses, norms)


# Largest relative error of what a step changes in one matrix, and of a loss.
BOUNDS = {torch.float32: (5e-4, 1e-5), torch.float16: (1e-2, 1e-3)}


@pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "fp16"])
def test_a_run_takes_the_steps_that_are_written_out(case_file, tmp_path, dtype):
    file = case_file(CASE, dtype=dtype)
    trainer = trainer_of(file, tmp_path, dtype)
    recorder, expected = Recorder(trainer), written_out(trainer, load_file(file))
    assert min(expected.norms) < 0.9 * LIMIT and max(expected.norms) > 1.1 * LIMIT
    trainer.run()
    start, *steps = recorder.weights
    assert len(steps) == STEPS and start.keys() == expected.weights[0].keys()
    matrix, loss = BOUNDS[dtype]
    for actual, reference, previous, before_there in zip(
        steps, expected.weights, [start, *steps], [start, *expected.weights], strict=False
    ):
        for name in start:
            change = reference[name] - before_there[name]
            assert (actual[name] - previous[name] - change).norm() <= matrix * change.norm(), name
    assert [report.loss for report in recorder.reports] == pytest.approx(expected.losses, rel=loss)
    assert [report.learning_rate for report in recorder.reports] == pytest.approx(RATES)
    assert [r.seconds_left / r.seconds_per_step for r in recorder.reports] == pytest.approx([4, 3, 2, 1, 0])
    scale = trainer.learner.scaler.get_scale()
    assert scale == (2.0**16 if dtype == torch.float16 else 1.0)
    trainer.close()


def test_fp16_steps_whose_gradients_overflow_are_skipped_and_the_state_keeps_the_lower_scale(case_file, tmp_path):
    file = case_file(CASE, dtype=torch.float16)
    trainer, resumed = (trainer_of(file, tmp_path, torch.float16) for _ in range(2))
    scaler = trainer.learner.scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**60})
    recorder = Recorder(trainer)
    trainer.run()
    start, *steps = recorder.weights
    assert len(steps) == STEPS and all(torch.equal(weights[name], start[name]) for weights in steps for name in start)
    assert scaler.get_scale() == 2.0 ** (60 - STEPS)
    trainer.save_final()
    resumed.resume(state_path(tmp_path, STEPS))
    assert resumed.learner.scaler.get_scale() == 2.0 ** (60 - STEPS)
    for candidate in (trainer, resumed):
        candidate.close()


@pytest.mark.parametrize("kind", ["dropout", "rank_dropout", "module_dropout"])
def test_each_micro_batch_of_each_step_and_each_layer_has_dropout_masks_of_its_own(
    tiny_flux, tmp_path, kind, monkeypatch
):
    network = NetworkOptions(rank=8, alpha=8.0, **{kind: 0.5})
    data = tiny.make_data([(4, 4)] * 8, [16] * 8)
    options = {"steps": 3, "gradient_accumulation": 2, "batch_size": 8, "network": network}
    trainer = tiny.make_trainer(tiny_flux, data, tmp_path, **options)
    masks, sample_masks = list[bytes](), LoraNetwork.sample_masks

    def recorded(*args: Any) -> Any:
        sampled = sample_masks(*args)
        masks.extend(mask.update.numpy().tobytes() for mask in sampled.values())
        return sampled

    monkeypatch.setattr(LoraNetwork, "sample_masks", recorded)
    trainer.run()
    layers, batches = len(trainer.network.adapters), 3 * 2
    assert len(masks) == layers * batches
    assert len({tuple(masks[i * layers : (i + 1) * layers]) for i in range(batches)}) == batches
    assert len({tuple(masks[i::layers]) for i in range(layers)}) == layers
    trainer.close()

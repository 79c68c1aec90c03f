"""Waits of a step: once, for the loss and the norm of the gradients together, before anything moves."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from tessera.data.samples import Prompt
from tessera.lora.options import NetworkOptions
from tessera.memory.host.to_device import to_device
from tessera.models import family as family_module
from tessera.train.config.settings import MemoryOptions
from tessera.train.loop.learner import Learner
from tessera.train.objective import batch as batch_module
from tessera.train.objective import preservation
from tessera.train.objective.options import ObjectiveOptions
from tessera.train.optim.options import OptimizerOptions
from tessera.train.report.errors import TrainingStopped
from tessera.train.report.observer import SilentObserver, StepReport
from tiny.memory.two_devices import DEVICE, TwoDevices
from tiny.models.qwen_image import qwen_sample
from tiny.train.runs import sample, training_data

pytestmark = pytest.mark.usefixtures("unchecked")

FAMILIES = ("flux", "wan", "qwen_image")
ACCUMULATION = 3
ONCE = {"tolist": 1}


def make_sample(family: str, name: str) -> Any:
    if family == "wan":
        return tiny.wan_sample(name, (2, 2, 4))
    return qwen_sample(name, 4, 4) if family == "qwen_image" else sample(name, 4, 4)


def with_everything(family: str, name: str) -> Any:
    """A sample with a mask, a weight of its own and a class caption."""
    item = make_sample(family, name)
    read, other = item.load(), make_sample(family, f"the class of {name}").load()
    weights = torch.linspace(0, 1, item.tokens)
    both_prompts = replace(read, weights=weights, class_prompt=Prompt(other.text, other.conditioning))
    return replace(item, class_caption=True, loss_weight=0.5, load=lambda *_: both_prompts)


class PerStep(SilentObserver):
    """Keeps what was counted in each step, and the reports."""

    def __init__(self, devices: TwoDevices) -> None:
        self.devices = devices
        self.reads: list[Counter[str]] = []
        self.move_counts: list[int] = []
        self.mixed: list[Counter[str]] = []
        self.reports: list[StepReport] = []

    def step(self, report: StepReport) -> None:
        devices = self.devices
        for record, counted in (
            (self.reads, devices.reads),
            (self.move_counts, devices.moved_count),
            (self.mixed, devices.mixed),
        ):
            record.append(counted)
        devices.reads = Counter()
        devices.moved_count = 0
        devices.mixed = Counter()
        self.reports.append(report)


def run(trainer: Any) -> PerStep:
    devices = TwoDevices()
    devices.put_weights_of(trainer)
    watcher = tiny.observe(trainer, PerStep(devices))
    with devices.watched():
        trainer.run()
    return watcher


# Tensors of a micro-batch: those of the family's inputs with the caption and again with the class caption; the target,
# the noise levels, the mask, the weights of the samples, and which of them have a class caption.
MOVED = {"flux": 2 * 6 + 5, "wan": 2 * 4 + 5, "qwen_image": 2 * 4 + 5}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_waits_once_and_moves_its_batches_without_waiting(family, tiny_files, tmp_path, monkeypatch) -> None:
    calls = []

    def counted_call(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        calls.append(tensor)
        return to_device(tensor, device)

    for module in (family_module, batch_module, preservation):
        monkeypatch.setattr(module, "to_device", counted_call)
    settings = {
        "steps": 2,
        "batch_size": 2,
        "gradient_accumulation": ACCUMULATION,
        "network": NetworkOptions(rank=4, include=("*blocks.0.*",), scale_weight_norms=0.1, dropout=0.1),
        "optimizer": OptimizerOptions(learning_rate=1e-2, ema_decay=0.9),
        "objective": ObjectiveOptions(preservation_weight=0.5, loss="huber", weighting="cosmap", noise_offset=0.1),
    }
    data = training_data(*(with_everything(family, name) for name in "abc"))
    model = tiny.load_model(family, tiny_files[family])
    counted = run(tiny.make_trainer(model, data, tmp_path / "counted", **settings))
    assert counted.reads == [ONCE] * 2
    # The second step's first batch is made and moved in the first one.
    assert counted.move_counts == [(ACCUMULATION + 1) * MOVED[family], (ACCUMULATION - 1) * MOVED[family]]
    assert len(calls) == sum(counted.move_counts)
    # The lengths of captions are read where they are, on the host.
    lengths = {"ragged_attention", "ragged_attention_backward"} if family == "qwen_image" else set()
    assert [set(mixed) for mixed in counted.mixed] == [lengths] * 2
    plain = tiny.make_trainer(model, data, tmp_path / "plain", **settings)
    plain.run()
    assert [report.loss for report in counted.reports] == plain.progress.loss
    assert all(type(report.loss) is float for report in counted.reports)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_swapped_blocks_are_copied_and_nothing_else(checkpointing, tiny_flux, tmp_path) -> None:
    memory = MemoryOptions(checkpointing=checkpointing, blocks_to_swap=3)
    trainer = tiny.make_trainer(tiny_flux, tiny.make_data([(4, 4)], [16]), tmp_path, steps=2, memory=memory)
    counted = run(trainer)
    assert counted.reads == [ONCE] * 2
    assert (
        counted.mixed[1] == {"copy_": trainer.train_step.copies} and trainer.train_step.copies == 2
    )  # two slots stay at each turn


@pytest.fixture(scope="module")
def after_a_backward(tiny_files, tmp_path_factory) -> Any:
    """A trainer with gradients, and their loss, on the device."""
    model = tiny.load_flux(tiny_files["flux"])
    network = NetworkOptions(rank=4, alpha=8.0, include=("single_blocks.0.*",), scale_weight_norms=0.1)
    trainer = tiny.make_trainer(model, tiny.make_data([(4, 4)], [16]), tmp_path_factory.mktemp("run"), network=network)
    tiny.fill_up_matrices(trainer)
    trainer.train_step.batches.reader.prefetch(tiny.micro_batch(0))
    devices = TwoDevices()
    devices.put_weights_of(trainer)
    with devices.watched():
        loss = trainer.train_step.forward_backward([tiny.micro_batch(0)])
    yield trainer, devices, loss
    trainer.close()


# What an optimizer's library does by itself, for the p matrices that it steps: reads in the first step and in later
# ones, and what it moves in the first. Prodigy sums its estimate on the host, two numbers of each matrix (prodigyopt's
# prodigy.py: delta_numerator and d_denom), and asks at first whether each is zero.
TWICE = {"_local_scalar_dense": 2}
OWN = {
    "prodigy": (lambda p: {"_local_scalar_dense": 3 * p}, lambda p: {"_local_scalar_dense": 2 * p}, 0),
    "pytorch_optimizer.Prodigy": (lambda p: TWICE, lambda p: TWICE, 0),  # whether there is a gradient, and its estimate
    "adafactor": (lambda p: {}, lambda p: {}, 2),  # its two rows of zeros
}
OPTIMIZERS = ("adamw", "adamw8bit", "prodigy", "adafactor", "came", "adamw_schedulefree", "lion", "muon")
OPTIMIZERS += ("pytorch_optimizer.AdaBelief", "pytorch_optimizer.Prodigy")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_each_optimizer_a_step_waits_once_but_for_what_its_library_reads(name, after_a_backward) -> None:
    trainer, devices, loss = after_a_backward
    custom = {"optimizer": "custom", "optimizer_class": name} if "." in name else {"optimizer": name}
    options = OptimizerOptions(**custom, ema_decay=0.0 if name == "adamw_schedulefree" else 0.9)
    trainer.learner = trainer.train_step.learner = Learner(trainer.network, options, 4, torch.float32, "cpu")
    devices.put_weights_of(trainer)
    matrices = len(trainer.network.parameters())
    first, later, move_count = OWN.get(name, (lambda p: {}, lambda p: {}, 0))
    for extra_reads, moves in ((first, move_count), (later, 0)):
        devices.reads = Counter()
        devices.moved_count = 0
        devices.mixed = Counter()
        with devices.watched():
            assert math.isfinite(trainer.train_step.finite(loss))
            trainer.train_step.optimizer_step()
        assert devices.reads == ONCE | extra_reads(matrices)
        assert devices.moved_count == moves * matrices and not devices.mixed


@pytest.mark.parametrize(("quantity", "number"), [("loss", math.inf), ("loss", math.nan), ("gradient", math.inf)])
def test_values_that_are_not_finite_are_named_and_move_nothing(
    quantity, number, tiny_flux, tmp_path, monkeypatch
) -> None:
    trainer = tiny.make_trainer(tiny_flux, tiny.make_data([(4, 4)], [16]), tmp_path)
    initial = {name: master.clone() for name, master in trainer.network.master_weights().items()}
    computed = trainer.train_step.forward_backward

    def spoilt(batch: Any) -> torch.Tensor:
        total = computed(batch)
        parameter = trainer.network.parameters()[-1]
        parameter.grad[0, 0] = number  # a loss that is not finite has such gradients too
        return total + number if quantity == "loss" else total

    monkeypatch.setattr(trainer.train_step, "forward_backward", spoilt)
    with pytest.raises(
        TrainingStopped, match=f"The {quantity} is NaN or infinite at step 1, before the LoRA has changed"
    ):
        trainer.run()
    assert all(torch.equal(initial[name], master) for name, master in trainer.network.master_weights().items())
    assert not any(trainer.learner.optimizer.state.values()) and trainer.progress.intact


def test_the_stand_in_for_a_gpu_sees_what_a_gpu_waits_for() -> None:
    devices = TwoDevices()
    on_host = torch.tensor([1.0, 0.0])
    with devices.watched():
        on_device = on_host.to(DEVICE)
        ones = torch.ones(2, device=on_device.device)
        for wait in (
            lambda: float(on_device.sum()),
            lambda: bool((on_device > 0).all()),
            lambda: on_device[on_device > 0],
            lambda: on_device.nonzero(),
            lambda: (on_device + ones).tolist(),
            lambda: on_device.to("cpu"),
        ):
            read_count = devices.reads.total()
            wait()
            assert devices.reads.total() > read_count
        assert float(on_host.sum()) == 1.0 and devices.moved_count == 1 and not devices.mixed
        on_device.copy_(on_host)
        on_device[:1] = on_host[:1]
        assert devices.mixed == {"copy_": 2}

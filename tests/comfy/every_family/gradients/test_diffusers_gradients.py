"""LoRA gradients of every family equal those of diffusers' model with peft's LoRA, in fp64 from the same noisy latents.

The references of tests/reference share ComfyUI's conventions; here positions, packing and timesteps are those of
diffusers' own models and pipelines, but for the numbers of a row's `as_core`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import tiny
import torch
from family_cases import CASES, cases
from peft import LoraConfig
from tessera.lora.options import NetworkOptions
from tessera.models.blocks import linear_shapes
from tessera.train.config.settings import MemoryOptions
from tiny.models.family_case import Diffusers, computing_in, relative_error
from tiny.train.reference_gradients import Gradients, gradient, lora_gradients, written_out_loss
from tiny.train.runs import training_data
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("unchecked")

RANK, ALPHA = 2, 4.0
# Largest relative error of one matrix's gradient: both sides have tables of sines in fp32.
BOUND = 2e-6
Rows = Mapping[str, tuple[str, Tensor]]
"""Linears of diffusers' model: each the Linear of ComfyUI's and its rows that it is."""


def rows_of(kit: Diffusers, model: Any) -> Rows:
    """Found by sending numbered rows through a table of names that is not ours."""
    starts = {}
    numbered = {}
    end = 1
    for name, (out, width) in linear_shapes(model.model).items():
        starts[name], end = end, end + out
        numbered[f"{name}.weight"] = torch.arange(end - out, end).double()[:, None].repeat(1, width)
    rows_by_layer = {}
    for diffusers_name, rows in kit.rows(model, numbered).items():
        if rows.any():  # zeros stand for what is no Linear
            native_name = max((name for name in starts if starts[name] <= rows.min()), key=starts.__getitem__)
            rows_by_layer[diffusers_name.removesuffix(".weight")] = native_name, rows[:, 0].long() - starts[native_name]
    return rows_by_layer


def add_lora(transformer: Any, rows: Rows, masters: Mapping[str, Tensor]) -> None:
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="|".join(map(re.escape, rows)))
    transformer.add_adapter(config)
    for diffusers_name, (native_name, index) in rows.items():
        layer = transformer.get_submodule(diffusers_name)
        layer.lora_A["default"].weight.data = masters[f"{native_name}.down"].detach().double()
        layer.lora_B["default"].weight.data = masters[f"{native_name}.up"].detach().double()[index]


def gradients_of(transformer: Any, rows: Rows, masters: Mapping[str, Tensor]) -> Gradients:
    """By the names of our LoRA's state."""
    gradients = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in masters.items()}
    for diffusers_name, (native_name, index) in rows.items():
        layer = transformer.get_submodule(diffusers_name)
        gradients[f"{native_name}.down"] += gradient(layer.lora_A["default"].weight)
        gradients[f"{native_name}.up"][index] += gradient(layer.lora_B["default"].weight)
    return gradients


def in_diffusers() -> Iterator[Any]:
    for case in cases("gradients", "diffusers"):
        for batch in case.diffusers().batches:
            yield pytest.param(case, batch, id=f"{case.name}-{batch}")


@pytest.mark.parametrize(("case", "batch"), in_diffusers())
def test_gradients_equal_those_of_diffusers_and_peft(case_file, tmp_path, case, batch):
    model, kit = case.load(case_file(case)), case.diffusers()
    transformer, rows = kit.build(model).double(), rows_of(kit, model)
    data, network = training_data(*case.batches()[batch]()), NetworkOptions(rank=RANK, alpha=ALPHA, include=("*",))
    options = {"network": network, "memory": MemoryOptions(checkpointing="none"), "batch_size": len(data.samples)}
    trainer = tiny.make_trainer(computing_in(model, torch.float64), data, tmp_path, **options)
    tiny.fill_up_matrices(trainer)
    masters = trainer.network.master_weights()
    rows = {
        diffusers_name: (native_name, index)
        for diffusers_name, (native_name, index) in rows.items()
        if f"{native_name}.down" in masters
    }
    assert {f"{native_name}.{side}" for native_name, _ in rows.values() for side in ("down", "up")} == masters.keys()
    add_lora(transformer, rows, masters)
    kit.as_core(transformer)

    def velocity(sample: Any, x_t: Tensor, sigma: float) -> Tensor:
        return kit.velocity(transformer, sample, x_t, sigma, trainer.settings.objective.guidance)

    expected_loss = written_out_loss(case, trainer.settings, data.samples, velocity)
    expected_loss.backward()
    loss = trainer.train_step.forward_backward([tiny.micro_batch(*range(len(data.samples)))])
    actual = lora_gradients(trainer)
    assert float(loss) == pytest.approx(float(expected_loss.detach()), rel=1e-6)
    for name, value in gradients_of(transformer, rows, masters).items():
        assert (actual[name] - value).norm() <= BOUND * value.norm(), name
    trainer.close()


class CorePositions(nn.Module):
    """Rotary positions of Qwen-Image as ComfyUI counts them: the middle of n rows is row n // 2, where diffusers rounds
    up; and text begins where the picture alone ends, where diffusers looks at the references too."""

    def forward(self, shapes: Any, max_txt_seq_len: int, device: Any) -> tuple[Tensor, Tensor]:
        pictures = [
            torch.cartesian_prod(torch.tensor([i]), torch.arange(h) - h // 2, torch.arange(w) - w // 2)
            for i, (_, h, w) in enumerate(shapes[0])
        ]
        begin = max(shapes[0][0]) // 2
        text = torch.arange(begin, begin + max_txt_seq_len)[:, None].expand(-1, 3)
        return self.waves(torch.cat(pictures)), self.waves(text)

    def waves(self, positions: Tensor) -> Tensor:
        rates = [10_000 ** -(torch.arange(0, size, 2) / size) for size in (8, 28, 28)]
        angles = torch.cat([positions[:, i : i + 1] * rate for i, rate in enumerate(rates)], dim=1)
        return torch.polar(torch.ones_like(angles), angles)


@pytest.mark.parametrize(
    ("name", "batch", "place"),
    [("qwen-image", "shapes", 2), ("qwen-image-edit-2511", "even sides, a larger reference", 0)],
    ids=["odd sides", "a larger reference"],
)
def test_qwen_image_s_positions_are_core_s_where_diffusers_has_others(case_file, name, batch, place):
    case = CASES[name]
    model = case.load(case_file(case))
    kit = case.diffusers()
    sample = case.batches()[batch]()[place]
    transformer = kit.build(model).double()
    x_t = sample.load().latent.double()
    sigma = 0.6
    core = case.core_velocity(model, sample, sigma)
    with torch.no_grad():
        assert relative_error(kit.velocity(transformer, sample, x_t, sigma, 1.0), core) > 1e-3
        transformer.pos_embed = CorePositions()
        assert relative_error(kit.velocity(transformer, sample, x_t, sigma, 1.0), core) < 1e-5

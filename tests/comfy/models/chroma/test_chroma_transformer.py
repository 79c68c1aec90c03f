"""Chroma's gradients are those of diffusers' model in fp64; neither pads nor the approximator have a part in them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from family_cases import CASES
from family_cases.chroma import diffusers_model, diffusers_rows
from safetensors.torch import load_file
from tessera.lora.options import NetworkOptions
from tessera.models.chroma.transformer import Approximator
from tessera.models.family import NoisySample
from tiny.models.chroma import chroma_sample
from tiny.models.family_case import computing_in, our_velocity
from tiny.train.runs import training_data
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

CASE = CASES["chroma"]
SIGMAS = torch.tensor([0.2, 0.55, 0.9])
SHAPES = ((4, 6, 1), (8, 3, 31), (2, 12, 128))


@pytest.fixture
def file(case_file) -> Path:
    return case_file(CASE)


def make_trainer(file: Path, folder: Path, **settings: Any) -> Any:
    data = training_data(*(chroma_sample(f"picture {i}", *shape) for i, shape in enumerate(SHAPES)))
    trainer = tiny.make_trainer(CASE.load(file), data, folder, **settings)
    tiny.fill_up_matrices(trainer)
    return trainer


def inputs_of(trainer: Any, length: int = 128) -> Any:
    read = [sample.load() for sample in trainer.context.data.samples]
    samples = [NoisySample(r.latent, r.text, r.conditioning, 24, length) for r in read]
    return trainer.context.family.forward.inputs(trainer.context.patcher, samples, SIGMAS, 1.0)


def direction() -> Tensor:
    return torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(7))


def gradients(trainer: Any, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The velocity, and the gradients of <velocity, direction> by the names of the state."""
    trainer.learner.zero_grad()
    velocity = trainer.placed.velocity(inputs, (0, 0))
    (velocity * direction()).sum().backward()
    pairs = trainer.network.pairs.items()
    masters = {f"{n}.{side}": p for n, pair in pairs for side, p in zip(("down", "up"), pair, strict=True)}
    return velocity.detach(), {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in masters.items()}


def positions(height: int, width: int) -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack((torch.zeros_like(rows), rows, columns), dim=-1).reshape(-1, 3).double()


def test_gradients_equal_those_of_diffusers_in_fp64(file, tmp_path):
    """Sample by sample with its bare caption there, in one padded batch here."""
    trainer = make_trainer(file, tmp_path)
    inputs = inputs_of(trainer)
    velocity, actual = gradients(trainer, inputs)
    lora, masters = tiny.reference_masters(trainer)
    weights = {name: tensor.double() for name, tensor in load_file(file).items()}
    for name, (down, up, scale) in lora.items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + scale * (up @ down)
    names_of_diffusers = {name.replace(".scale", ".weight"): tensor for name, tensor in weights.items()}
    model, converted = (
        diffusers_model(trainer.context.patcher).double(),
        diffusers_rows(trainer.context.patcher, names_of_diffusers),
    )
    assert converted.keys() == dict(model.named_parameters()).keys()
    total = torch.zeros((), dtype=torch.float64)
    for i, (height, width, length) in enumerate(SHAPES):
        arguments = {
            "hidden_states": inputs.tokens[i : i + 1].double(),
            "encoder_hidden_states": inputs.text[i : i + 1, :length].double(),
            "timestep": SIGMAS[i : i + 1].double(),
            "img_ids": positions(height, width),
            "txt_ids": torch.zeros(length, 3, dtype=torch.float64),
        }
        reference = torch.func.functional_call(model, converted, kwargs=arguments).sample[0]
        assert (velocity[i] - reference).norm() <= 1e-4 * reference.norm()
        total = total + (reference * direction()[i]).sum()
    total.backward()
    assert actual.keys() == masters.keys() and all(p.grad is not None for p in masters.values())
    for name, master in masters.items():
        assert (actual[name] - master.grad).norm() <= 1e-4 * master.grad.norm(), name


def test_pads_have_no_part_in_velocity_and_gradients(file, tmp_path):
    """Not even a last bit, whatever stands in their place; a token of a caption in their place has one."""
    trainer = make_trainer(file, tmp_path)
    inputs = inputs_of(trainer)
    velocity, expected = gradients(trainer, inputs)
    pads = torch.arange(128) >= torch.tensor([[length] for *_, length in SHAPES])
    noise = 1e3 * torch.randn(inputs.text.shape, generator=torch.Generator().manual_seed(3))
    filled = torch.where(pads[..., None], noise, inputs.text)
    repeated, actual = gradients(trainer, replace(inputs, text=filled))
    assert torch.equal(repeated, velocity) and all(torch.equal(actual[n], expected[n]) for n in expected)
    shifted, _ = gradients(trainer, replace(inputs, text=filled, lengths=inputs.lengths + torch.tensor([1, 0, 0])))
    assert not torch.allclose(shifted[0], velocity[0]) and torch.equal(shifted[1:], velocity[1:])


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], ids=["flash", "math"])
def test_a_longer_step_of_the_ladder_changes_nothing(file, tmp_path, kernel):
    trainer = make_trainer(file, tmp_path)
    with sdpa_kernel(kernel):
        (velocity, expected), (longer, actual) = (gradients(trainer, inputs_of(trainer, n)) for n in (128, 256))
    assert torch.allclose(longer, velocity, rtol=1e-5, atol=1e-5)
    for name, value in expected.items():
        assert (actual[name] - value).norm() <= 2e-5 * value.norm(), name


def test_the_approximator_is_frozen_and_keeps_nothing_for_backward(file, tmp_path):
    trainer = make_trainer(file, tmp_path, network=NetworkOptions(rank=2, alpha=2.0, include=("*",)))
    transformer = trainer.placed.weights.transformer
    assert not any("distilled_guidance_layer" in name for name in trainer.network.pairs)
    vectors = transformer.approximator(SIGMAS, torch.zeros(3), torch.float32)
    assert vectors.shape == (3, 344, 128) and not vectors.requires_grad and vectors.grad_fn is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_the_approximator_is_told_time_guidance_and_number_as_core_does(case_file, monkeypatch, dtype):
    """Bit for bit: sigma is embedded in float32, guidance in the model's dtype, the number of a vector in float32."""
    model = computing_in(CASE.load(case_file(CASE, dtype=dtype)), dtype)
    sample, arguments = chroma_sample("one", 4, 6, 9, guidance=3.3), []
    approximator = model.model.diffusion_model.distilled_guidance_layer
    with approximator.register_forward_pre_hook(lambda _, inputs: arguments.append(inputs[0])):
        CASE.core_velocity(model, sample, 0.8137)
    build = Approximator.__init__

    def recording(self, *args: Any) -> None:
        build(self, *args)
        self.in_proj.register_forward_pre_hook(lambda _, args: arguments.append(args[0]))

    monkeypatch.setattr(Approximator, "__init__", recording)
    our_velocity(model, [sample], [0.8137])
    reference, actual = arguments
    assert (
        reference.shape == (1, 344, 64) and reference.dtype == actual.dtype == dtype and torch.equal(actual, reference)
    )

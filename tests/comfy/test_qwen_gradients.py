"""The LoRA gradients of Qwen-Image in every mode equal an fp64 reference that sees each caption alone, unpadded."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from tessera.common.rng import generator
from tessera.lora.options import NetworkOptions
from tessera.models.family import NoisySample
from tessera.train.objective.noise import draw_noise
from tessera.train.objective.timestep_sampling import draw_sigma
from tessera.train.settings import MemoryOptions
from tiny.qwen_data import qwen_sample
from tiny.runs import training_data
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

REFERENCE = runpy.run_path(str(Path(__file__).parents[1] / "reference" / "qwen_image.py"))
qwen_image_forward, to_tokens = REFERENCE["qwen_image_forward"], REFERENCE["to_tokens"]

MODES = ("none", "selective", "full")
FP32, BF16 = 1e-4, 0.06
SHIFT = 2.2  # musubi-tuner's


@pytest.fixture(scope="module")
def files(tiny_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    zero = tmp_path_factory.mktemp("qwen") / "2511.safetensors"
    return {"plain": tiny_files["qwen_image"], "2511": tiny.write_qwen_image(zero, timestep_zero=True)}


def three(kind: str = "plain", tokens: int | None = None) -> Any:
    """Three aspect ratios of 24 tokens with captions of three lengths, for the edit model with two references each."""
    references = {"plain": [()] * 3, "2511": [[(4, 6), (6, 8)], [(6, 4), (8, 6)], [(12, 2), (4, 12)]]}[kind]
    shapes = [(4, 6, 5), (6, 4, 40), (3, 8, 128)]
    pairs = zip(shapes, references, strict=True)
    return training_data(*(qwen_sample(f"{kind} {i}", *s, r, tokens=tokens) for i, (s, r) in enumerate(pairs)))


def reference_gradients(
    trainer: Any, tensors: dict[str, Tensor], batch: tuple[int, ...], method: str
) -> tuple[float, dict[str, Tensor]]:
    """The loss and its gradients written out in fp64: mean over samples of mean((v − (noise − x0))²)."""
    settings = trainer.settings
    lora, masters = tiny.reference_masters(trainer)
    format = trainer.patcher.model.latent_format
    mean, std = (x.double().reshape(16, 1, 1) for x in (format.latents_mean, format.latents_std))
    total = torch.zeros((), dtype=torch.float64)
    for place, index in enumerate(batch):
        sample = trainer.data.samples[index]
        read = sample.load()
        x0 = (read.latent[:, 0].double() - mean) / std
        sigma = draw_sigma(settings.objective, generator(settings.seed, "sigma", 0, 0, place), sample.tokens, SHIFT)
        sigma = float(torch.tensor(sigma, dtype=torch.float32))
        noise = draw_noise(read.latent.shape, generator(settings.seed, "noise", 0, 0, place))[:, 0].double()
        target = to_tokens(noise - x0)[0][: sample.tokens]
        velocity = qwen_image_forward(
            tensors,
            (1 - sigma) * x0 + sigma * noise,
            read.text[0].double(),
            sigma,
            references=[(r[0, :, 0].double() - mean) / std for r in read.conditioning.get("reference_latents", ())],
            method=method,
            keep=sample.tokens,
            lora=lora,
        )
        total = total + (velocity - target).square().mean() / len(batch)
    total.backward()
    return float(total.detach()), {name: _gradient(p) for name, p in masters.items()}


def _gradient(p: Tensor) -> Tensor:
    """The last block's text goes nowhere: its queries and what follows have no gradient, or zeros."""
    return torch.zeros_like(p).double() if p.grad is None else p.grad.double()


def gradients(trainer: Any, batch: tuple[int, ...]) -> tuple[float, dict[str, Tensor]]:
    loss = trainer.forward_backward([tiny.shown(*batch)])
    pairs = trainer.network.pairs.items()
    return loss, {f"{n}.{s}": _gradient(p) for n, pair in pairs for s, p in zip(("down", "up"), pair, strict=True)}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= bound * float(value.norm()), name


def load(file: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = tiny.load_qwen_image(file)
    if dtype != torch.float32:
        model.set_model_compute_dtype(dtype)
        model.model.manual_cast_dtype = dtype
    return model


def check(file: Path, data: Any, folder: Path, batch: int, bound: float, method: str = "index", **settings: Any) -> Any:
    model = load(file, torch.float32 if bound == FP32 else torch.bfloat16)
    trainer = tiny.make_trainer(model, data, folder, batch_size=batch, **settings)
    tiny.fill_up_matrices(trainer)
    loss, found = gradients(trainer, tuple(range(batch)))
    expected_loss, expected = reference_gradients(trainer, load_file(file), tuple(range(batch)), method)
    assert abs(loss - expected_loss) < bound * expected_loss
    assert_near(found, expected, bound)
    unused = {n for n, value in expected.items() if not value.norm()}
    assert {n.rpartition(".")[0].removeprefix("transformer_blocks.1.") for n in unused} <= {
        "attn.add_q_proj",
        "attn.to_add_out",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    }
    trainer.close()
    return found


METHOD = {"plain": "index", "2511": "index_timestep_zero"}


# Compiling takes seconds a case: there swap and batch size change together.
CASES = [(None, mode, swap, batch) for mode in MODES for swap in (0, 2) for batch in (1, 3)]
CASES += [("aot_eager", mode, swap, batch) for mode in MODES for swap, batch in ((0, 3), (2, 1))]


@pytest.mark.parametrize(("backend", "mode", "swap", "batch"), CASES)
def test_gradients_of_an_edit_model_equal_the_fp64_reference(files, tmp_path, backend, mode, swap, batch):
    memory = MemoryOptions(checkpointing=mode, blocks_to_swap=swap)
    check(files["2511"], three("2511"), tmp_path, batch, FP32, METHOD["2511"], backend=backend, memory=memory)


@pytest.mark.parametrize(
    ("backend", "mode", "batch"),
    [(None, "none", 1), (None, "full", 3), ("aot_eager", "none", 3), ("aot_eager", "selective", 1)],
)
def test_gradients_without_references_equal_the_fp64_reference(files, tmp_path, backend, mode, batch):
    memory = MemoryOptions(checkpointing=mode)
    check(files["plain"], three("plain"), tmp_path, batch, FP32, METHOD["plain"], backend=backend, memory=memory)


@pytest.mark.slow  # a cold inductor takes 30 to 80 s for each kind of block
def test_gradients_of_inductor_equal_the_fp64_reference(files, tmp_path):
    memory = MemoryOptions(checkpointing="full", blocks_to_swap=1)
    check(files["2511"], three("2511"), tmp_path, 3, FP32, METHOD["2511"], backend="inductor", memory=memory)


@pytest.mark.parametrize(("kind", "backend"), [("plain", None), ("2511", None), ("2511", "aot_eager")])
def test_gradients_in_bf16_stay_within_its_rounding(tmp_path, kind, backend):
    zero = kind == "2511"
    file = tiny.write_qwen_image(tmp_path / "bf16.safetensors", timestep_zero=zero, dtype=torch.bfloat16)
    check(file, three(kind), tmp_path, 3, BF16, METHOD[kind], backend=backend)


def test_gradients_of_a_ragged_edge_are_those_of_its_tokens(files, tmp_path):
    check(files["plain"], three(tokens=22), tmp_path, 3, FP32)


def test_gradients_reach_every_linear_of_the_model(files, tmp_path):
    network = NetworkOptions(rank=2, alpha=2.0, include=("*",))
    check(files["2511"], three("2511"), tmp_path, 3, FP32, METHOD["2511"], network=network)


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], ids=["flash", "math"])
def test_three_captions_in_one_batch_give_the_gradients_of_three_batches_of_one(files, tmp_path, kernel, backend):
    """Sample by sample: in a padded batch where only its velocity counts, and alone with its caption as it is."""
    data = three("2511")
    lengths = [5, 40, 128]
    trainers = {
        name: tiny.make_trainer(load(files["2511"]), data, tmp_path / name, backend=given)
        for name, given in (("together", backend), ("alone", None))
    }
    direction = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(7))
    for place, length in enumerate(lengths):
        with sdpa_kernel(kernel):
            together = of_one_sample(trainers["together"], data, (0, 1, 2), 128, place, direction)
        alone = of_one_sample(trainers["alone"], data, (place,), length, 0, direction[place : place + 1])
        assert_near(together, alone, 2e-5)


def of_one_sample(
    trainer: Any, data: Any, batch: tuple[int, ...], text_length: int, place: int, direction: Tensor
) -> dict[str, Tensor]:
    """The gradients of <velocity of the sample at `place`, its direction>."""
    tiny.fill_up_matrices(trainer)
    read = [data.samples[i].load() for i in batch]
    samples = [NoisySample(r.latent, r.text, r.conditioning, 24, text_length) for r in read]
    sigma = torch.tensor([0.2, 0.5, 0.9])[list(batch)]
    velocity = trainer.placed.velocity(trainer.family.inputs(trainer.patcher, samples, sigma, 1.0), (0, 0))
    trainer.learner.optimizer.zero_grad()
    (velocity[place] * direction[place]).sum().backward()
    pairs = trainer.network.pairs.items()
    return {f"{n}.{s}": _gradient(p) for n, pair in pairs for s, p in zip(("down", "up"), pair, strict=True)}

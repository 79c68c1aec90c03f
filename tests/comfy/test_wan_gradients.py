"""Wan's LoRA gradients in every mode equal an fp64 reference: plain autograd over the formulas, nothing recomputed."""

import runpy
from pathlib import Path
from typing import Any

import comfy.model_management
import pytest
import tiny
import torch
from safetensors.torch import load_file
from tessera.common.rng import generator
from tessera.lora.options import NetworkOptions
from tessera.train.objective.noise import draw_noise
from tessera.train.objective.timestep_sampling import draw_sigma
from tessera.train.settings import MemoryOptions
from tiny.runs import training_data
from tiny.wan_core import core_velocity, padded_text, tokens_of
from torch import Tensor

wan_forward = runpy.run_path(str(Path(__file__).parents[1] / "reference" / "wan.py"))["wan_forward"]

VARIANTS = tuple(tiny.WAN_CHANNELS)
# A picture and two clips of 24 tokens; the same with a ragged edge, of 18.
GRIDS, KEPT = [(3, 4, 2), (1, 4, 6), (2, 3, 4)], [None, None, None]
RAGGED = [(3, 3, 2), (1, 4, 5), (2, 2, 5)], [6, 18, 9]
BATCHES = {1: (0,), 3: (0, 1, 2)}
MODES = ("none", "selective", "full")
# Largest relative error of one matrix's gradient: in fp32 that of the timestep's sines, whose arguments reach 1000.
FP32, BF16 = 1e-4, 0.06
SHIFT = 3.0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wan")
    return {v: tiny.write_wan(folder / f"{v}.safetensors", variant=v, layers=3) for v in VARIANTS}


def data_of(variant: str, grids: Any = GRIDS, kept: Any = KEPT) -> Any:
    """5B's clips come with a clean first frame."""
    samples = [
        tiny.wan_sample(f"sample {i}", grid, variant, keep=keep, clean_frames=int(variant == "2.2-5b" and grid[0] > 1))
        for i, (grid, keep) in enumerate(zip(grids, kept, strict=True))
    ]
    return training_data(*samples)


def inside(x: Tensor, sample: Any) -> Tensor:
    """(1, N, 4·C): the tokens of a latent (C, T, H, W) that are kept."""
    return tokens_of(x)[:, : sample.tokens // sample.grid[0]].flatten(0, 1)[None]


def reference_velocity(tensors: dict[str, Tensor], variant: str, sample: Any, x_t: Tensor, sigma: float, **lora: Any):
    """wan_forward on a noisy latent (C, T, H, W) in the model's space, in its dtype."""
    read, dtype = sample.load(), x_t.dtype
    frames, height, width = sample.grid
    x = x_t
    if "concat_latent_image" in read.conditioning:
        picture = in_model_space(variant, read.conditioning["concat_latent_image"][0].to(dtype))
        given = (1 - read.conditioning["concat_mask"][0].to(dtype)).repeat(4, 1, 1, 1)
        x = torch.cat((x, given, picture))
    axes = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
    positions = torch.stack(axes, dim=-1).reshape(frames, -1, 3)[:, : sample.tokens // frames].reshape(1, -1, 3)
    timestep = torch.where(positions[..., 0] < sample.clean_frames, 0.0, 1000 * torch.tensor(sigma, dtype=dtype))
    vision = read.conditioning.get("clip_vision_output")
    return wan_forward(
        {name: tensor.to(dtype) for name, tensor in tensors.items()},
        inside(x, sample),
        positions,
        padded_text(sample).to(dtype),
        timestep,
        image=None if vision is None else vision.penultimate_hidden_states.to(dtype),
        num_heads=1,
        **lora,
    )


def in_model_space(variant: str, latent: Tensor) -> Tensor:
    """(latent − mean) / std of each channel, by the numbers that ComfyUI has of Wan's autoencoders."""
    import comfy.latent_formats

    known = comfy.latent_formats.Wan22() if variant == "2.2-5b" else comfy.latent_formats.Wan21()
    return (latent - known.latents_mean[0].to(latent)) / known.latents_std[0].to(latent)


def reference_gradients(trainer: Any, tensors: dict[str, Tensor], variant: str, batch: tuple[int, ...]) -> Any:
    """The loss and its gradients written out in fp64: the mean over samples of mean((v − (noise − x0))²), which leaves
    out the tokens of clean frames."""
    settings, data = trainer.settings, trainer.data
    lora, masters = tiny.reference_masters(trainer)
    total = torch.zeros((), dtype=torch.float64)
    for place, index in enumerate(batch):
        sample = data.samples[index]
        x0 = in_model_space(variant, sample.load().latent.double())
        sigma = draw_sigma(settings.objective, generator(settings.seed, "sigma", 0, 0, place), sample.tokens, SHIFT)
        sigma = float(torch.tensor(sigma, dtype=torch.float32))
        noise = draw_noise(x0.shape, generator(settings.seed, "noise", 0, 0, place)).double()
        x_t = (1 - sigma) * x0 + sigma * noise
        clean = sample.clean_frames
        x_t[:, :clean] = x0[:, :clean]
        velocity = reference_velocity(tensors, variant, sample, x_t, sigma, lora=lora)
        first = clean * sample.tokens // sample.grid[0]
        error = (velocity - inside(noise - x0, sample))[:, first:]
        total = total + error.square().mean() / len(batch)
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in masters.items()}


def check(path: Path, variant: str, folder: Path, batch: int, bound: float, **settings: Any) -> None:
    data = settings.pop("data", None) or data_of(variant)
    dtype = settings.pop("dtype", None)
    model = tiny.load_wan(path)
    if dtype is not None:
        model.set_model_compute_dtype(dtype)
        model.model.manual_cast_dtype = dtype
    trainer = tiny.make_trainer(model, data, folder, batch_size=batch, **settings)
    tiny.fill_up_matrices(trainer)
    loss = trainer.forward_backward([tiny.shown(*BATCHES[batch])])
    found = {
        f"{name}.{side}": p.grad.double()
        for name, pair in trainer.network.pairs.items()
        for side, p in zip(("down", "up"), pair, strict=True)
    }
    expected_loss, expected = reference_gradients(trainer, load_file(path), variant, BATCHES[batch])
    assert abs(loss - expected_loss) < bound * expected_loss
    assert found.keys() == expected.keys()
    worst = {k: float((found[k] - expected[k]).norm() / expected[k].norm()) for k in expected}
    assert max(worst.values()) < bound, max(worst.items(), key=lambda item: item[1])
    trainer.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_reference_equals_comfyuis_forward(files, variant):
    model, tensors = tiny.load_wan(files[variant]), load_file(files[variant])
    comfy.model_management.load_models_gpu([model])
    for sample in data_of(variant).samples:
        x = sample.load().latent
        with torch.no_grad():
            theirs = core_velocity(model, sample, 0.6, x[None])
        ours = reference_velocity(tensors, variant, sample, x.double(), 0.6).float()
        assert (ours - theirs).norm() < 1e-4 * theirs.norm()


# Compiling takes seconds a case: there swap and batch size change together, and the other pairs run by name.
CASES = [(None, mode, swap, batch) for mode in MODES for swap in (0, 3) for batch in (1, 3)]
CASES += [("aot_eager", mode, swap, batch) for mode in MODES for swap, batch in ((0, 1), (3, 3))]
REST = [("aot_eager", mode, swap, batch) for mode in MODES for swap, batch in ((0, 3), (3, 1))]


@pytest.mark.parametrize(
    ("backend", "mode", "swap", "batch"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)]
)
def test_gradients_of_5b_with_clean_frames_equal_the_fp64_reference(files, tmp_path, backend, mode, swap, batch):
    memory = MemoryOptions(checkpointing=mode, blocks_to_swap=swap)
    check(files["2.2-5b"], "2.2-5b", tmp_path, batch, FP32, backend=backend, memory=memory)


@pytest.mark.parametrize("swap", [0, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "2.2-5b"])
def test_gradients_of_the_others_equal_the_fp64_reference(files, tmp_path, variant, mode, swap):
    memory = MemoryOptions(checkpointing=mode, blocks_to_swap=swap)
    check(files[variant], variant, tmp_path, 3, FP32, memory=memory)


BY_TURNS = [("2.1-t2v", "none"), ("2.1-i2v", "selective"), ("2.1-t2v", "full")]
OTHERS = [("2.1-i2v", "none"), ("2.1-t2v", "selective"), ("2.1-i2v", "full")]


@pytest.mark.parametrize(
    ("variant", "mode"), [*BY_TURNS, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_gradients_of_compiled_blocks_equal_the_fp64_reference(files, tmp_path, variant, mode):
    memory = MemoryOptions(checkpointing=mode, blocks_to_swap=2)
    check(files[variant], variant, tmp_path, 3, FP32, backend="aot_eager", memory=memory)


@pytest.mark.slow  # a cold inductor takes 30 to 80 s for each kind of block
@pytest.mark.parametrize("variant", ["2.1-t2v", "2.1-i2v", "2.2-5b"])  # one of each kind of block
def test_gradients_of_inductor_equal_the_fp64_reference(files, tmp_path, variant):
    memory = MemoryOptions(checkpointing="full")
    check(files[variant], variant, tmp_path, 3, FP32, backend="inductor", memory=memory)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_a_ragged_edge_are_those_of_its_tokens(files, tmp_path, variant):
    check(files[variant], variant, tmp_path, 3, FP32, data=data_of(variant, *RAGGED))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_reach_every_linear_of_the_model(files, tmp_path, variant):
    network = NetworkOptions(rank=2, alpha=2.0, include=("*",))
    check(files[variant], variant, tmp_path, 3, FP32, network=network)


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_in_bf16_stay_within_its_rounding(tmp_path, variant, backend):
    path = tiny.write_wan(tmp_path / "bf16.safetensors", variant=variant, layers=3, dtype=torch.bfloat16)
    memory = MemoryOptions(checkpointing="full")
    check(path, variant, tmp_path, 3, BF16, backend=backend, memory=memory, dtype=torch.bfloat16)

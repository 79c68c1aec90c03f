"""The LoRA gradients of every mode equal an fp64 reference: plain autograd over the formulas, nothing recomputed."""

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
from tessera.models.flux.family import Flux
from tessera.train.objective.noise import draw_noise
from tessera.train.objective.timestep_sampling import draw_sigma
from tessera.train.settings import MemoryOptions
from torch import Tensor

flux_forward = runpy.run_path(str(Path(__file__).parents[1] / "reference" / "flux.py"))["flux_forward"]

# Three aspect ratios of 48 tokens; three captions.
GRIDS = [(4, 12), (8, 6), (6, 8)]
BATCHES = {1: (0,), 3: (0, 1, 2)}
MODES = ("none", "selective", "full")
# Largest relative error of one matrix's gradient. fp32: the sines of the timestep alone, whose arguments reach 1000,
# move the velocity by 1.3e-5; bf16 rounds each result to 2^-9 of itself.
FP32, BF16 = 1e-4, 0.06


def reference_gradients(
    trainer: Any, tensors: dict[str, Tensor], batch: tuple[int, ...]
) -> tuple[float, dict[str, Tensor]]:
    """The loss and its gradients written out in fp64: mean over samples of mean((v − (noise − x0))²)."""
    settings, data = trainer.settings, trainer.data
    lora, masters = tiny.reference_masters(trainer)
    total = torch.zeros((), dtype=torch.float64)
    for place, index in enumerate(batch):
        sample = data.samples[index]
        read = sample.load()
        # FLUX's latent space, as Black Forest Labs' autoencoder defines it.
        x0 = (read.latent.double() - 0.1159) * 0.3611
        sigma = draw_sigma(settings.objective, generator(settings.seed, "sigma", 0, 0, place), sample.tokens)
        sigma = float(torch.tensor(sigma, dtype=torch.float32))
        noise = draw_noise(x0.shape, generator(settings.seed, "noise", 0, 0, place)).double()
        tokens, ids = to_tokens((1 - sigma) * x0 + sigma * noise)
        target, _ = to_tokens(noise - x0)
        keep = sample.tokens
        velocity = flux_forward(
            {k: v.double() for k, v in tensors.items()},
            tokens[:, :keep],
            ids[:, :keep],
            read.text.double(),
            read.conditioning["pooled_output"].double(),
            torch.tensor([sigma], dtype=torch.float64),
            torch.tensor([settings.objective.guidance], dtype=torch.float64),
            num_heads=1,
            lora=lora,
        )
        total = total + (velocity - target[:, :keep]).square().mean() / len(batch)
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in masters.items()}


def to_tokens(latent: Tensor) -> tuple[Tensor, Tensor]:
    channels, height, width = latent.shape
    h, w = height // 2, width // 2
    tokens = latent.reshape(channels, h, 2, w, 2).permute(1, 3, 0, 2, 4).reshape(1, h * w, 4 * channels)
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(1, h * w, 3)
    return tokens, ids


def gradients(trainer: Any, batch: tuple[int, ...]) -> tuple[float, dict[str, Tensor]]:
    loss = trainer.forward_backward([tiny.shown(*batch)])
    found = {}
    for name, pair in trainer.network.pairs.items():
        for side, p in zip(("down", "up"), pair, strict=True):
            found[f"{name}.{side}"] = p.grad.double()
    return loss, found


def worst_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error over the matrices."""
    assert found.keys() == expected.keys()
    return max(float((found[k] - expected[k]).norm() / expected[k].norm()) for k in expected)


def check(model: Any, file: Path, folder: Path, batch: int, bound: float, **settings: Any) -> None:
    data = tiny.make_data(GRIDS, [16, 16, 16], tokens=settings.pop("tokens", None))
    trainer = tiny.make_trainer(model, data, folder, batch_size=batch, **settings)
    tiny.fill_up_matrices(trainer)
    loss, found = gradients(trainer, BATCHES[batch])
    expected_loss, expected = reference_gradients(trainer, load_file(file), BATCHES[batch])
    assert abs(loss - expected_loss) < bound * expected_loss
    assert worst_error(found, expected) < bound
    trainer.close()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_gradients_equal_the_fp64_reference(tiny_files, tiny_flux, tmp_path, backend, mode, batch):
    memory = MemoryOptions(checkpointing=mode)
    check(tiny_flux, tiny_files["flux"], tmp_path, batch, FP32, backend=backend, memory=memory)


def test_gradients_of_inductor_equal_the_fp64_reference(tiny_files, tiny_flux, tmp_path):
    memory = MemoryOptions(checkpointing="full")
    check(tiny_flux, tiny_files["flux"], tmp_path, 3, FP32, backend="inductor", memory=memory)


# Compiled, each mode stands above in fp32: in bf16 and over budgets one case is quick, and the rest run by name.
IN_BF16 = [*((None, mode) for mode in MODES), ("aot_eager", "full")]
IN_BF16 += [pytest.param("aot_eager", mode, marks=pytest.mark.slow) for mode in ("none", "selective")]
BUDGETS = [(None, 0.0), (None, 0.3), (None, 1.0), ("aot_eager", 0.3)]
BUDGETS += [pytest.param("aot_eager", budget, marks=pytest.mark.slow) for budget in (0.0, 1.0)]


@pytest.mark.parametrize(("backend", "mode"), IN_BF16)
def test_gradients_in_bf16_stay_within_its_rounding(tmp_path, backend, mode):
    file = tiny.write_flux(tmp_path / "bf16.safetensors", dtype=torch.bfloat16)
    model = tiny.load_flux(file)
    model.set_model_compute_dtype(torch.bfloat16)
    model.model.manual_cast_dtype = torch.bfloat16
    memory = MemoryOptions(checkpointing=mode)
    check(model, file, tmp_path, 3, BF16, backend=backend, memory=memory)


@pytest.mark.parametrize(("backend", "budget"), BUDGETS)
def test_every_activation_budget_gives_the_same_gradients(tiny_files, tiny_flux, tmp_path, backend, budget):
    memory = MemoryOptions(checkpointing="selective", activation_budget=budget)
    check(tiny_flux, tiny_files["flux"], tmp_path, 1, FP32, backend=backend, memory=memory)


def test_gradients_of_a_ragged_edge_are_those_of_its_tokens(tiny_files, tiny_flux, tmp_path):
    check(tiny_flux, tiny_files["flux"], tmp_path, 3, FP32, tokens=45)


def test_gradients_reach_every_linear_of_the_model(tiny_files, tiny_flux, tmp_path):
    network = NetworkOptions(rank=2, alpha=2.0, include=("*",))
    check(tiny_flux, tiny_files["flux"], tmp_path, 3, FP32, network=network)


@pytest.mark.parametrize("mode", MODES)
def test_the_comparison_fails_on_comfyuis_own_block_forward(tiny_flux, tmp_path, mode):
    """Core's blocks add to their inputs in place. Run in our loop they must not pass: here autograd notices."""
    data = tiny.make_data(GRIDS, [16, 16, 16])
    trainer = tiny.make_trainer(tiny_flux, data, tmp_path, memory=MemoryOptions(checkpointing=mode))
    tiny.fill_up_matrices(trainer)
    ours = trainer.placed.transformer.double_blocks[1]
    ours.forward = core_forward(tiny_flux.model.diffusion_model.double_blocks[1], ours)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(trainer, (0,))


def core_forward(core: Any, ours: Any) -> Any:
    """ComfyUI's DoubleStreamBlock.forward over our Linears, called as ours is."""
    import comfy.model_management
    from comfy.ldm.flux.layers import ModulationOut

    for name, linear in ours.linears().items():
        native = ours.native_name(name)
        if native.endswith("mod.lin"):
            owner = core.get_submodule(native.removesuffix(".lin"))

            def modulation(vec: Tensor, linear: Any = linear) -> tuple[ModulationOut, ModulationOut]:
                parts = linear(vec).chunk(6, dim=-1)
                return ModulationOut(*parts[:3]), ModulationOut(*parts[3:])

            owner.forward = modulation
        else:
            core.get_submodule(native).forward = linear.forward

    def forward(img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor, masks: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        cos, sin = pe.unbind(-1)
        matrices = torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))
        comfy.model_management.in_training = True
        try:
            # Core is called on tensors that it may change, as its own loop does between blocks.
            return core.forward(img=img.view_as(img), txt=txt.view_as(txt), vec=vec, pe=matrices)
        finally:
            comfy.model_management.in_training = False

    return forward


@pytest.mark.parametrize("tokens", [48, 45], ids=["whole", "ragged"])
def test_the_forward_equals_comfyuis_on_the_same_weights_and_tokens(tiny_flux, tmp_path, tokens):
    """Whole grids against `apply_model`; a ragged edge against core's model run on just the tokens that are kept."""
    import comfy.model_management

    data = tiny.make_data(GRIDS, [16, 16, 16], tokens=tokens)
    family, sigma = Flux(), torch.tensor([0.2, 0.5, 0.9])
    loaded = [s.load() for s in data.samples]
    comfy.model_management.load_models_gpu([tiny_flux])
    expected = []
    with torch.no_grad():
        for level, read in zip(sigma, loaded, strict=True):
            pooled, guidance = read.conditioning["pooled_output"], torch.tensor([3.5])
            if tokens == 48:
                x = read.latent[None]
                denoised = tiny_flux.model.apply_model(
                    x, level[None], c_crossattn=read.text, y=pooled, guidance=guidance
                )
                expected.append(to_tokens(((x - denoised) / level)[0])[0])
                continue
            kept, ids = (t[:, :tokens] for t in to_tokens(read.latent))
            text_ids = torch.zeros(1, read.text.shape[1], 3)
            core = tiny_flux.model.diffusion_model
            expected.append(core.forward_orig(kept, ids.float(), read.text, text_ids, level[None], pooled, guidance))
    trainer = tiny.make_trainer(tiny_flux, data, tmp_path)
    samples = [NoisySample(r.latent, r.text, r.conditioning, tokens, r.text.shape[1]) for r in loaded]
    with torch.no_grad():
        found = trainer.placed.velocity(family.inputs(trainer.patcher, samples, sigma, 3.5), (0, 0))
    assert torch.allclose(found, torch.cat(expected), rtol=1e-4, atol=1e-5)

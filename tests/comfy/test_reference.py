"""The written-out FLUX says what ComfyUI's does, so that it can stand as the reference for gradients."""

import runpy
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor

flux_forward = runpy.run_path(str(Path(__file__).parents[1] / "reference" / "flux.py"))["flux_forward"]

GRIDS = [(4, 12), (7, 5)]


def to_tokens(latent: Tensor) -> tuple[Tensor, Tensor]:
    """A latent (B, C, 2h, 2w) as tokens (B, h·w, 4·C) in the order (channel, row, column), and their ids."""
    b, c, height, width = latent.shape
    h, w = height // 2, width // 2
    tokens = latent.reshape(b, c, h, 2, w, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w, 4 * c)
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(1, h * w, 3)
    return tokens, ids.expand(b, -1, -1)


def inputs(grid: tuple[int, int], batch: int, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(batch, 16, 2 * grid[0], 2 * grid[1], generator=g),
        "txt": torch.randn(batch, 11, tiny.T5_WIDTH, generator=g),
        "pooled": torch.randn(batch, tiny.CLIP_WIDTH, generator=g),
        "sigma": torch.linspace(0.2, 0.85, batch),
        "guidance": torch.linspace(1.0, 3.5, batch),
    }


def comfy_velocity(model, x, txt, pooled, sigma, guidance) -> Tensor:
    import comfy.model_management

    comfy.model_management.load_models_gpu([model])
    device = model.load_device
    x, txt, pooled, sigma, guidance = (t.to(device) for t in (x, txt, pooled, sigma, guidance))
    with torch.no_grad():
        denoised = model.model.apply_model(x, sigma, c_crossattn=txt, y=pooled, guidance=guidance)
    return ((x - denoised) / sigma[:, None, None, None]).cpu()


def reference(tensors, x, txt, pooled, sigma, guidance, dtype=torch.float32, **kwargs) -> Tensor:
    tokens, ids = to_tokens(x.to(dtype))
    heads = tensors["img_in.weight"].shape[0] // 128
    return flux_forward(tensors, tokens, ids, txt, pooled, sigma, guidance, num_heads=heads, **kwargs)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", ["flux", "schnell"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_reference_equals_comfyui_s_forward(name, grid, tiny_files):
    batch = inputs(grid, 2)
    ours = reference(load_file(tiny_files[name]), **batch)
    theirs = to_tokens(comfy_velocity(tiny.load_flux(tiny_files[name]), **batch))[0]
    assert relative(ours, theirs) < 1e-5


def test_two_heads_are_taken_apart_as_comfyui_does(tmp_path):
    file = tiny.write_flux(tmp_path / "flux.safetensors", hidden=256, depth=1, depth_single=1)
    batch = inputs(GRIDS[0], 1)
    theirs = to_tokens(comfy_velocity(tiny.load_flux(file), **batch))[0]
    assert relative(reference(load_file(file), **batch), theirs) < 1e-5


def test_the_tensors_of_a_loaded_model_serve_as_well_as_those_of_the_file(tiny_flux, tiny_files):
    batch = inputs(GRIDS[1], 1)
    loaded = tiny_flux.model.diffusion_model.state_dict()
    assert torch.equal(reference(loaded, **batch), reference(load_file(tiny_files["flux"]), **batch))


def test_float64_goes_beyond_float32(tiny_files):
    """In float32 most of the error is that of the timestep's sines, whose arguments run up to 1000."""
    batch, tensors = inputs(GRIDS[0], 2), load_file(tiny_files["flux"])
    exact = reference(tensors, **batch, dtype=torch.float64)
    assert exact.dtype == torch.float64
    assert 1e-8 < relative(reference(tensors, **batch).double(), exact) < 1e-4


def test_a_lora_equals_the_weights_it_stands_for(tiny_files):
    batch, tensors = inputs(GRIDS[0], 2), load_file(tiny_files["flux"])
    g = torch.Generator().manual_seed(3)
    lora, merged = {}, {name: t.double() for name, t in tensors.items()}
    for name in ("double_blocks.1.txt_attn.qkv", "double_blocks.0.img_mlp.2", "single_blocks.1.linear1"):
        out, width = tensors[f"{name}.weight"].shape
        down = torch.randn(3, width, generator=g, dtype=torch.float64) / width**0.5
        up = torch.randn(out, 3, generator=g, dtype=torch.float64)
        lora[name] = (down, up, 0.5)
        merged[f"{name}.weight"] = merged[f"{name}.weight"] + 0.5 * up @ down
    beside = reference(tensors, **batch, dtype=torch.float64, lora=lora)
    assert relative(beside, reference(merged, **batch, dtype=torch.float64)) < 1e-12
    assert relative(beside, reference(tensors, **batch, dtype=torch.float64)) > 1e-2


def test_its_gradients_are_those_of_finite_differences(tiny_files):
    batch, tensors = inputs((2, 3), 1), load_file(tiny_files["flux"])
    g = torch.Generator().manual_seed(4)
    name = "double_blocks.0.img_attn.qkv"
    down = (torch.randn(2, 128, generator=g, dtype=torch.float64) / 11).requires_grad_()
    up = torch.randn(384, 2, generator=g, dtype=torch.float64).requires_grad_()

    def loss(d, u):
        return reference(tensors, **batch, dtype=torch.float64, lora={name: (d, u, 1.0)}).square().mean()

    loss(down, up).backward()
    directions = [torch.randn(t.shape, generator=g, dtype=torch.float64) for t in (down, up)]
    step = 1e-6
    with torch.no_grad():
        plus, minus = (loss(down + s * directions[0], up + s * directions[1]) for s in (step, -step))
    slope = sum((t.grad * d).sum() for t, d in zip((down, up), directions, strict=True))
    assert float((plus - minus) / (2 * step)) == pytest.approx(float(slope), rel=1e-6)

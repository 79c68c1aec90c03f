"""Files of every stored dtype train as they lie: the forward is ComfyUI's, and only stored bytes wait for backward."""

from itertools import product

import comfy.model_management
import pytest
import tiny
import torch
from tessera.compile.settings import CompileSettings
from tessera.lora.network import LoraNetwork
from tessera.lora.options import NetworkOptions
from tessera.lora.plan import choose_targets
from tessera.memory.host.flat_weights import parts_of
from tessera.memory.weights.frozen import dequantised_notes, unload
from tessera.models.flux.family import Flux
from tessera.models.flux.transformer import FluxInputs
from tessera.models.layers.lora_linear import LoraLinear
from tessera.models.model_patches import trainable_model
from tessera.train.blocks.block_runner import BlockRunner
from tessera.train.config.settings import MemoryOptions
from thinned import one_in
from tiny.train.runs import mixed_data, train

# Where a device computes in fp32, core widens plain files as it loads them; a weight_dtype keeps them as they are.
KEPT = {"kept bf16": torch.bfloat16, "kept fp16": torch.float16, "kept fp8": torch.float8_e4m3fn}
FILES = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "kept bf16": {"dtype": torch.bfloat16},
    "kept fp16": {"dtype": torch.float16},
    "plain fp8": {"dtype": torch.float8_e4m3fn},
    "kept fp8": {"dtype": torch.float8_e4m3fn},
    "scaled fp8": {"dtype": torch.bfloat16, "fp8": True},
}
# Where core widens them here too; every layout stands in test_quantised_weights.
FILES |= {name: {"dtype": torch.bfloat16, "quantised": name} for name in ("nvfp4 smoothed", "mxfp8")}
HIDDEN = 128
HEIGHT = 4
WIDTH = 6
TEXT = 10
TOKENS = HEIGHT * WIDTH


@pytest.fixture(params=FILES)
def stored(request, tmp_path):
    """(name, MODEL of a file of that dtype, loaded as core's loader does)."""
    with torch.inference_mode():
        path = tiny.write_flux(tmp_path / "flux.safetensors", **FILES[request.param])
        return request.param, tiny.load_flux(path, KEPT.get(request.param))


def build_transformer(model, dtype=None):
    patcher, _ = trainable_model(model)
    unload()
    device = patcher.load_device
    return Flux().forward.build(patcher, device, dtype or patcher.model.get_dtype_inference(), "auto")


def core_parts(model, name):
    return parts_of(model.model.get_submodule(f"diffusion_model.{name}").weight)


def test_the_forward_of_every_stored_dtype_is_comfyuis_own(stored):
    _, model = stored
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 16, 2 * HEIGHT, 2 * WIDTH, generator=generator)
    text = torch.randn(2, TEXT, tiny.T5_WIDTH, generator=generator)
    pooled = torch.randn(2, tiny.CLIP_WIDTH, generator=generator)
    sigma, guidance = torch.tensor([0.3, 0.8]), torch.tensor([3.5, 1.0])
    dtype = model.model.get_dtype_inference()
    with torch.no_grad():
        comfy.model_management.load_models_gpu([model])
        args = {"c_crossattn": text.to(dtype), "y": pooled.to(dtype), "guidance": guidance.to(dtype)}
        denoised = model.model.apply_model(x, sigma, **args)
        reference = (x - denoised) / sigma.view(-1, 1, 1, 1)
        family, transformer = Flux(), build_transformer(model)
        cut = [family.forward.patchify(latent, TOKENS) for latent in x.to(dtype)]
        inputs = FluxInputs(
            tokens=torch.stack([c.tokens for c in cut]),
            positions=torch.stack([c.positions for c in cut]),
            text=text.to(dtype),
            pooled=pooled.to(dtype),
            timestep=sigma,
            guidance=guidance.to(dtype),
        )
        result = transformer.forward(lambda block, *rest: block(*rest, {}), inputs)
    expected = torch.stack([family.forward.patchify(latent, TOKENS).tokens for latent in reference])
    error = ((result - expected).norm() / expected.norm()).item()
    # Another order of the same sums: fp32 to its last digits, 16-bit within a few of its roundings (2^-8, 2^-11).
    assert error < {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype], error


def test_a_lora_trains_on_a_file_of_every_stored_dtype(stored, tmp_path):
    name, model = stored
    result = train(model, mixed_data(), tmp_path / "loras", batch_size=2, memory={"checkpointing": "none"})
    assert len(result.loss) == 6 and all(0 < loss < 20 for loss in result.loss)
    assert {t.dtype for t in result.lora.values()} == {torch.float32}
    ups = [t for key, t in result.lora.items() if "lora_up" in key]
    assert all(t.isfinite().all() and t.abs().max() > 1e-3 for t in ups), name


def test_losses_on_a_stored_file_come_near_those_on_the_fp32_file(stored, tiny_flux, tmp_path):
    name, model = stored
    result = train(model, mixed_data(), tmp_path / "stored", batch_size=2)
    reference = train(tiny_flux, mixed_data(), tmp_path / "fp32", batch_size=2)
    close = 1e-6 if name == "fp32" else 0.2 if "fp8" in name or "fp4" in name else 0.02
    assert result.loss == pytest.approx(reference.loss, rel=close)


def test_weights_on_the_training_device_are_shared_without_a_copy(stored):
    name, model = stored
    transformer = build_transformer(model)
    if comfy.model_management.get_torch_device().type != "cpu":
        pytest.skip("the master weights lie on the host")
    linears = {n: lin for n, lin in transformer.linears().items() if "_blocks." in n}
    assert len(linears) == 2 * 10 + 2 * 3
    for layer, linear in linears.items():
        master = core_parts(model, layer)[0]
        assert linear.weight.data_ptr() == master.data_ptr() and linear.weight.dtype == master.dtype, layer
        assert not linear.weight.is_inference()
        quantised = core_parts(model, layer)[1:]
        assert [part.data_ptr() for part in linear.frozen().parts] == [
            part.data_ptr() for part in quantised if name != "scaled fp8"
        ]
        assert (linear.weight_scale is not None) == bool(quantised)
        if name in KEPT:
            assert linear.weight.dtype == KEPT[name]


def saved_bytes(run):
    """(result of `run`, what autograd keeps for its backward: {address of a storage: (its bytes, the tensor)})."""
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return result, saved


BLOCKS = [(*case, "lora") for case in product(["kept fp8", "scaled fp8"], ["double", "single"], [None, "aot_eager"])]
BLOCKS += [("scaled fp8", "single", None, algorithm) for algorithm in ("loha", "lokr", "dora", "oft")]
BLOCKS += [("kept fp8", "single", "aot_eager", "dora")]
BLOCKS += [("nvfp4 smoothed", kind, backend, "lora") for kind, backend in (("double", None), ("single", "aot_eager"))]
BLOCKS += [("nvfp4 smoothed", "single", None, "dora"), ("mxfp8", "double", None, "lora")]


@pytest.mark.parametrize(("name", "kind", "backend", "algorithm"), one_in(2, BLOCKS))
def test_a_block_of_a_stored_model_keeps_its_stored_bytes_for_backward_and_no_cast_copy(
    name, kind, backend, algorithm, tmp_path
):
    model = tiny.load_flux(tiny.write_flux(tmp_path / "flux.safetensors", **FILES[name]), KEPT.get(name))
    compute = torch.bfloat16
    transformer = build_transformer(model, compute)
    names, options = choose_targets(Flux(), model.model, NetworkOptions()), NetworkOptions(algorithm, rank=4)
    network = LoraNetwork(options, names, transformer.linears(), seed=0)
    settings = CompileSettings(backend) if backend else None
    torch._dynamo.reset()
    runner = BlockRunner(transformer.blocks(), MemoryOptions(checkpointing="none"), settings, 1, torch.device("cpu"))
    block = next(block for _, block in transformer.blocks() if block.kind == kind)

    generator = torch.Generator().manual_seed(0)
    length = 1 if kind == "double" else TEXT + TOKENS
    shapes = [(1, TOKENS, HIDDEN), (1, TEXT, HIDDEN)] if kind == "double" else [(1, length, HIDDEN)]
    states = [torch.randn(s, generator=generator).to(compute).requires_grad_() for s in shapes]
    vec = torch.randn(1, 1, HIDDEN, generator=generator).to(compute)
    angle = torch.rand(1, TEXT + TOKENS, 1, 64, generator=generator)
    pe = torch.stack((angle.cos(), angle.sin()), dim=-1)

    result, saved = saved_bytes(lambda: runner(block, *states, vec, pe, None, {}))
    # Nothing upstream of the modulation is trained, so autograd may let its weight go.
    needed = {n: lin.frozen() for n, lin in block.linears().items() if not n.endswith("mod")}
    stored = [part for frozen in needed.values() for part in (frozen.weight, *frozen.parts)]
    places = {part.untyped_storage().data_ptr() for part in stored}
    assert {frozen.weight.dtype for frozen in needed.values()} == {
        torch.uint8 if "fp4" in name else torch.float8_e4m3fn
    }
    assert sum(nbytes for place, (nbytes, _) in saved.items() if place in places) == sum(part.nbytes for part in stored)
    shapes_of_weights = {frozen.shape for frozen in needed.values()}
    shapes_of_weights |= {shape[::-1] for shape in shapes_of_weights}
    other_shapes = [tuple(tensor.shape) for place, (_, tensor) in saved.items() if place not in places]
    assert len(other_shapes) > 5 and not shapes_of_weights.intersection(other_shapes), other_shapes

    loss = sum(part.float().square().mean() for part in (result if isinstance(result, tuple) else (result,)))
    loss.backward()
    assert all(state.grad.isfinite().all() and state.grad.abs().max() > 0 for state in states)
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in network.parameters())


def test_an_ordinary_cast_would_keep_a_copy_where_this_linear_keeps_the_stored_weight(tmp_path):
    file = tiny.write_flux(tmp_path / "flux.safetensors", **FILES["kept fp8"])
    model = tiny.load_flux(file, KEPT["kept fp8"])
    linear: LoraLinear = build_transformer(model, torch.bfloat16).linears()["single_blocks.0.linear1"]
    x = torch.randn(5, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    sizes = {}
    for name, run in {
        "ours": lambda: linear(x),
        "plain": lambda: torch.nn.functional.linear(x, linear.weight.to(x.dtype), linear.bias),
    }.items():
        _, saved = saved_bytes(run)
        sizes[name] = sum(nbytes for nbytes, _ in saved.values())
    count = linear.weight.numel()
    assert sizes["plain"] >= 2 * count and sizes["ours"] <= linear.weight.untyped_storage().nbytes() + 8


def test_weights_that_training_cannot_keep_quantised_are_named_with_their_size(stored):
    name, model = stored
    transformer = model.model.diffusion_model
    assert dequantised_notes(transformer, torch.bfloat16) == []
    if name == "mxfp8":
        linear = transformer.double_blocks[0].img_mlp[0]
        count = linear.weight.numel()
        linear.weight = torch.nn.Parameter(linear.weight.t(), requires_grad=False)
        (note,) = dequantised_notes(transformer, torch.bfloat16)
        assert "as MXFP8 are converted to bfloat16" in note and f"{count * 2 / 2**30:.2f} GiB" in note

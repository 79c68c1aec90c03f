"""Every layout in which ComfyUI holds a quantised weight trains as it is stored: the numbers are core's dequantised
ones, what waits for backward are the stored parts, and block swap, compiling and the planner take them as they are."""

from pathlib import Path
from typing import Any

import comfy.model_management
import pytest
import tiny
import torch
from tessera.memory.host.flat_weights import parts_of
from tessera.memory.weights.formats.stored_format import Format, format_of, read_format
from tessera.memory.weights.frozen import FrozenWeights
from tessera.memory.weights.frozen_linear import FrozenLinear, quantised_linear
from tessera.models.adapters.dora import column_lengths
from tessera.models.layers.lora_linear import LoraLinear
from tessera.train.config.settings import MemoryOptions
from tiny.compile.compiling import Graphs, make_lora, with_lora
from tiny.memory.quantised import LAYER, core_layer, stored_layer
from tiny.models.flux import QUANTISED
from torch.utils.flop_counter import FlopCounterMode

OUT, IN = 144, 192  # neither a multiple of what nvfp4's and mxfp8's scales are cut into
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
layouts = pytest.mark.parametrize("storage", QUANTISED)


def random(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(storage: str, dtype: torch.dtype = torch.float32, out: int = OUT) -> tuple[Any, torch.Tensor]:
    """(FrozenLinear, core's weight in fp32)"""
    return stored_layer(storage, random(out, IN, std=0.1), random(out, seed=1), dtype)


def smoothing(frozen: Any) -> torch.Tensor:
    return torch.ones(1) if frozen.pre_quant_scale is None else frozen.pre_quant_scale


@layouts
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_forward_is_that_of_cores_dequantised_weight(storage: str, dtype: torch.dtype) -> None:
    patcher = core_layer(storage, random(OUT, IN, std=0.1), random(OUT, seed=1))
    frozen = FrozenWeights(patcher, CPU, dtype).linear(LAYER)
    module = patcher.model.get_submodule(f"diffusion_model.{LAYER}")
    x = random(2, 5, IN, seed=2).to(dtype)
    smoothed = x if frozen.pre_quant_scale is None else x * module.pre_quant_scale.to(dtype)
    expected = torch.nn.functional.linear(smoothed, module.weight.to(dtype).dequantize(), module.bias.to(dtype))
    assert frozen.shape == (OUT, IN) and (frozen.pre_quant_scale is None) == (storage != "nvfp4 smoothed")
    assert torch.equal(frozen.apply(x), expected)


# How far core's own layer is from that: where it widens the weight not at all. int8 and int4 round x too, to 127 and 7
# steps of its largest, which is about 3.5 deviations: 3.5 / 127 / √12 and 3.5 / 7 / √12, and half as much to spare.
ROUNDED = {"int8": 0.012, "int8 by rows": 0.012, "int8 rotated": 0.012, "int4 rotated": 0.22}


@pytest.mark.parametrize(
    "storage", [name for name in QUANTISED if name != "fp8 by rows"]
)  # core turns its scales wrong
def test_the_forward_is_that_of_cores_own_layer(storage: str) -> None:
    patcher = core_layer(storage, random(OUT, IN, std=0.1), random(OUT, seed=1))
    x = random(32, IN, seed=2)
    with torch.inference_mode():
        expected = patcher.model.get_submodule(f"diffusion_model.{LAYER}")(x)
    actual = FrozenWeights(patcher, CPU, torch.float32).linear(LAYER).apply(x)
    assert (actual - expected).norm() <= ROUNDED.get(storage, 0.0) * expected.norm()


@layouts
def test_gradients_are_those_of_the_dequantised_weight_in_fp64(storage: str) -> None:
    frozen, core = layer(storage)
    whole = (core * smoothing(frozen)).double()
    x, grad = random(2, 5, IN, seed=2).requires_grad_(), random(2, 5, OUT, seed=3)
    frozen.apply(x).backward(grad)
    x64 = x.detach().double().requires_grad_()
    (x64 @ whole.T).backward(grad.double())
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-5, atol=1e-5)
    rows = random(3, OUT, seed=4)
    torch.testing.assert_close(frozen.apply_transposed(rows).double(), rows.double() @ whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(frozen.full().double(), whole, rtol=1e-6, atol=0)
    torch.testing.assert_close(column_lengths(frozen).double(), whole.norm(dim=0), rtol=1e-5, atol=0)


def test_the_columns_of_a_smoothed_weight_are_as_long_as_they_multiply_where_it_is_stored_plainly() -> None:
    weight, smoothing = random(OUT, IN, std=0.1), 0.5 + random(IN, seed=1).abs()
    for stored in (weight, weight.to(torch.float8_e4m3fn)):
        frozen = FrozenLinear(stored, torch.tensor(0.5), None, pre_quant_scale=-smoothing)
        expected = (0.5 * stored.double() * smoothing.double()).norm(dim=0)
        torch.testing.assert_close(column_lengths(frozen).double(), expected, rtol=1e-5, atol=0)


@layouts
@pytest.mark.parametrize("compiled", [False, True])
def test_the_stored_parts_wait_for_backward_and_nothing_of_the_weights_size(storage: str, compiled: bool) -> None:
    frozen, _ = layer(storage, torch.bfloat16)
    x = random(2, 5, IN, seed=2).bfloat16().requires_grad_()
    torch._dynamo.reset()
    run = torch.compile(lambda frozen, x: frozen.apply(x), backend="aot_eager") if compiled else type(frozen).apply
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = run(frozen, x)
    inputs = [t for t in (frozen.weight, frozen.scale, *frozen.parts, frozen.pre_quant_scale) if t is not None]
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in inputs}
    assert sum(t.nbytes for t in saved) == sum(t.nbytes for t in inputs) < 1.3 * OUT * IN
    y.backward(torch.ones_like(y))
    assert x.grad is not None and x.grad.abs().max() > 0


@layouts
def test_layers_that_are_stored_alike_share_one_whole_graph(storage: str) -> None:
    models = [core_layer(storage, random(OUT, IN, seed=seed, std=0.1), random(OUT, seed=seed)) for seed in (1, 2)]
    linears = [LoraLinear(FrozenWeights(model, CPU, torch.float32), LAYER) for model in models]
    torch._dynamo.reset()
    graphs = Graphs()
    run = torch.compile(lambda linear, x: linear(x), backend="aot_eager", fullgraph=True, dynamic=False)
    for linear in linears:
        x = random(2, 5, IN, seed=3).requires_grad_()
        y = run(linear, x)
        y.sum().backward()
        mine, x.grad = x.grad, None
        linear(x).sum().backward()
        torch.testing.assert_close(y, linear(x), rtol=0, atol=0)
        torch.testing.assert_close(mine, x.grad, rtol=0, atol=0)
    assert graphs() == 1 and linears[0].storage == linears[1].storage


@layouts
def test_a_quantised_weight_costs_the_partitioner_as_much_as_a_plain_one(storage: str) -> None:
    frozen, core = layer(storage)
    x = random(2, 5, IN).requires_grad_()

    def flops(run: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            run().sum().backward()
        return counter.get_total_flops()

    assert flops(lambda: frozen.apply(x)) == flops(lambda: torch.nn.functional.linear(x, core))


def test_a_format_is_read_again_as_it_was_written() -> None:
    for storage in QUANTISED:
        weight = (
            core_layer(storage, random(OUT, IN), random(OUT)).model.get_submodule(f"diffusion_model.{LAYER}").weight
        )
        stored = format_of(weight)
        assert isinstance(stored, Format) and read_format(stored.text()) == stored and stored.shape == (OUT, IN)
        if "fp8 by rows" != storage and not storage.startswith("int4"):
            assert format_of(weight.t()) is None or "fp8" == storage  # fp8's data are turned themselves


def test_unused_outputs_have_no_gradient() -> None:
    frozen, _ = layer("nvfp4")
    x = random(5, IN).requires_grad_()
    gradients = torch.autograd.grad(
        (quantised_linear(x, [frozen.weight, *frozen.parts], None, frozen.layout) * 0 + x.sum()).sum(), x
    )
    assert torch.equal(gradients[0], torch.full_like(x, 5 * OUT))


# In the transformer.

IN_BLOCKS = ("nvfp4 smoothed", "mxfp8", "int8 rotated")


@pytest.fixture(scope="module", params=IN_BLOCKS)
def file(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantised")
    path = folder / f"{request.param}.safetensors"
    return tiny.write_flux(path, depth=1, depth_single=2, dtype=torch.bfloat16, quantised=request.param)


def trained(path: Path, folder: Path, backend: str | None = None, model: Any = None, **memory: Any) -> Any:
    with torch.inference_mode():  # as a node loads it
        model = model or tiny.load_flux(path)
    data = tiny.make_data([(4, 4), (2, 8)], [16, 16])
    options = MemoryOptions(**{"checkpointing": "full"} | memory)
    trainer = tiny.make_trainer(model, data, folder, backend=backend, steps=2, memory=options)
    tiny.fill_up_matrices(trainer)
    trainer.run()
    return trainer


def same_bits(first: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(first.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


CHECKPOINTING = dict(zip(IN_BLOCKS, ("none", "selective", "full"), strict=True))


def test_swapped_equals_resident_bit_for_bit(file: Path, tmp_path: Path) -> None:
    settings = {"checkpointing": CHECKPOINTING[file.stem]}
    resident = trained(file, tmp_path / "resident", **settings)
    with torch.inference_mode():
        model = tiny.load_flux(file)
    initial = {key: t.clone() for key, t in model.model.state_dict().items()}
    swapped = trained(file, tmp_path / "swapped", model=model, blocks_to_swap=3, **settings)
    assert swapped.progress.loss == resident.progress.loss
    for (name, pair), other in zip(swapped.network.pairs.items(), resident.network.pairs.values(), strict=True):
        for mine, reference in zip(pair, other, strict=True):
            assert torch.equal(mine, reference) and torch.equal(mine.grad, reference.grad), name
    # The host holds the weights once, and as they were.
    homes = {master.untyped_storage().data_ptr() for master in swapped.placed.weights.swap.ring.flat_weights}
    for name in ("single_blocks.1.linear1", "double_blocks.0.txt_mlp.0"):
        parts = parts_of(model.model.get_submodule(f"diffusion_model.{name}").weight)
        assert {part.untyped_storage().data_ptr() for part in parts} <= homes
    after = model.model.state_dict()
    assert after.keys() == initial.keys() and all(same_bits(initial[key], after[key]) for key in initial)


def test_the_planner_counts_the_stored_bytes(file: Path, tmp_path: Path) -> None:
    plain = tiny.write_flux(tmp_path / "flux.safetensors", depth=1, depth_single=2)
    measured = {}
    for name, path in {"plain": plain, "stored": file}.items():
        trainer = trained(path, tmp_path / name, checkpointing="auto", blocks_to_swap=-1)
        measured[name] = trainer.placed.memory.automatic.measured.blocks
    for block, other in zip(measured["stored"], measured["plain"], strict=True):
        assert block.saved == other.saved and block.inputs == other.inputs
        assert block.weights < other.weights * (0.2 if "fp4" in file.stem else 0.35)


def test_a_lora_on_the_model_is_rounded_as_comfyui_rounds_it(file: Path) -> None:
    with torch.inference_mode():
        model = tiny.load_flux(file)
    patched = with_lora(model, make_lora(model, inside="single_blocks.0.linear1"), 0.7)
    linear = FrozenWeights(patched, CPU, torch.float32).linear("single_blocks.0.linear1")
    name = "diffusion_model.single_blocks.0.linear1"
    untouched = parts_of(model.model.get_submodule(name).weight)[0].clone()
    with torch.inference_mode():
        comfy.model_management.load_models_gpu([patched], force_full_load=True)
        loaded = parts_of(patched.model.get_submodule(name).weight)
        assert linear.layout is not None and not same_bits(loaded[0], untouched)
        for mine, cores in zip((linear.weight, *linear.parts), loaded, strict=True):
            assert same_bits(mine, cores)
        comfy.model_management.unload_all_models()


def test_blocks_of_one_kind_that_are_stored_differently_have_a_graph_each(tmp_path: Path) -> None:
    path = tmp_path / "mixed.safetensors"
    tiny.write_flux(path, depth=1, depth_single=2, quantised="nvfp4", quantised_inside="single_blocks.1.")
    torch._dynamo.reset()
    graphs = Graphs()
    trainer = trained(path, tmp_path / "loras", "aot_eager", checkpointing="none", blocks_to_swap=3)
    assert graphs() == trainer.placed.execution.runner.planned_graphs == 3 and graphs.breaks == 0
    assert trainer.placed.execution.runner.not_compiled is None

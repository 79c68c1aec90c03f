"""MODELs of GGUF files train as they are stored: the forward is their loader's own, with the LoRAs that are on them."""

import re

import pytest
import tiny
import torch
from tessera.common.fingerprint import weights_fingerprint
from tessera.lora.plan import choose_targets
from tessera.memory.host.flat_buffer import Layout
from tessera.memory.swap.training import frozen_modules
from tessera.nodes.model.block_swap import TesseraBlockSwap
from tessera.train.placement import auto
from tessera.train.preflight.checks import check_run
from thinned import one_in
from tiny.compile.compiling import Graphs
from tiny.memory.gguf import flux_state, in_blocks, kind_of, model_of, native_model, stored_tensor
from tiny.memory.gguf_runs import both_forwards, copy_values, loha, memory_of, plain_lora, with_lora
from tiny.memory.swapping import assert_same_run, three_pictures, trained
from tiny.native import NAMED
from tiny.native.reference import plain_model
from tiny.native.row import build
from tiny.native.step import difference, trainer_of, written_out
from tiny.train.reference_gradients import lora_gradients
from tiny.train.runs import mixed_data, run_settings, train
from tiny.train.training import fill_up_matrices, micro_batch


@pytest.mark.parametrize("lora", [None, plain_lora, loha], ids=["no LoRA", "LoRA", "LoHa"])
@pytest.mark.parametrize(("name", "plain"), [("Q4_0", "F16"), ("Q8_0", "BF16")])
def test_the_forward_is_the_loader_s_own_with_the_loras_on_it(name, plain, lora):
    model = model_of(flux_state(name, plain))
    initial = memory_of(model)
    bare, _, _ = both_forwards(model)
    expected, actual, transformer = both_forwards(with_lora(model, lora and lora()))
    assert (actual - expected).norm() <= 2e-6 * expected.norm()
    assert lora is None or (expected - bare).norm() > 0.02 * bare.norm()
    assert all(torch.equal(tensor, initial[name]) for name, tensor in memory_of(model).items())
    diffusion_model = model.model.diffusion_model
    linears = {n: linear for n, linear in transformer.linears().items() if "_blocks." in n}
    full = {n for n, linear in linears.items() if linear.layout is None}
    assert full == ({"double_blocks.0.img_mlp.0"} if lora is loha else set()) and len(linears) == 2 * 10 + 2 * 3
    beside = {n for n, linear in linears.items() if linear.frozen().parts}
    lora_on = {"double_blocks.0.img_mlp.0", "single_blocks.1.linear2", "double_blocks.1.img_attn.qkv"}
    assert beside == (lora_on if lora is plain_lora else set())
    for n in linears.keys() - full:
        assert linears[n].weight.data_ptr() == diffusion_model.get_submodule(n).weight.data_ptr()


def test_a_lora_on_it_is_told_where_it_costs_memory(tmp_path):
    def notes(lora):
        patched = with_lora(model_of(flux_state("Q4_0")), lora)
        return [note for note in check_run(patched, mixed_data(), run_settings()).notes if "GGUF" in note]

    assert notes(None) == notes(plain_lora()) == []
    (note,) = notes(loha())
    assert note == (
        "Weights that the GGUF file holds under a LoRA that is large or of another kind are converted to float32 "
        "while it trains (0.00 GiB); all others stay as they are."
    )


def test_a_lora_of_it_has_the_keys_of_one_of_the_whole_file_and_comes_near_it(tiny_flux, tmp_path):
    state = flux_state("Q8_0")
    model = model_of(state)
    initial, name = memory_of(model), weights_fingerprint(model)
    result = train(model, mixed_data(), tmp_path / "gguf", batch_size=2)
    copy_values(model_of(state), tiny_flux)
    reference = train(tiny_flux, mixed_data(), tmp_path / "fp32", batch_size=2)
    assert result.lora.keys() == reference.lora.keys()
    assert all(result.lora[k].shape == reference.lora[k].shape for k in result.lora)
    assert result.loss == pytest.approx(reference.loss, rel=1e-5) and len(result.loss) == 6
    for key, tensor in memory_of(model).items():
        parameter = model.model.diffusion_model.get_parameter(key)
        assert torch.equal(tensor, initial[key])
        assert key not in state or (parameter.tensor_type, parameter.shape) == (
            state[key].tensor_type,
            state[key].shape,
        )
    assert (
        weights_fingerprint(model_of(flux_state("Q8_0"))) == name != weights_fingerprint(model_of(flux_state("Q4_0")))
    )


@pytest.mark.parametrize(
    ("backend", "checkpointing", "lora"),
    one_in(3, [("aot_eager", "none", plain_lora), (None, "none", None), (None, "full", plain_lora)]),
)
def test_swapped_blocks_are_the_same_run_and_stored_bytes_stream(backend, checkpointing, lora, tmp_path):
    torch._dynamo.reset()
    runs = {}
    for swapped in (0, 3):
        model = with_lora(model_of(flux_state("Q5_0")), lora and lora())
        graphs = Graphs()
        runs[swapped] = trained(
            model,
            three_pictures(),
            tmp_path / str(swapped),
            steps=2,
            backend=backend,
            checkpointing=checkpointing,
            blocks_to_swap=swapped,
        )
        # Blocks with a LoRA on them are graphs of their own.
        assert (
            graphs()
            == (runs[swapped].placed.execution.runner.planned_graphs if backend else 0)
            == (4 if backend else 0)
        )
        assert runs[swapped].placed.execution.runner.report.counts().graph_breaks == 0
    assert_same_run(runs[3], runs[0])
    ring = runs[3].placed.weights.swap.ring
    blocks = {id(block): block for block in runs[3].placed.weights.swap.blocks}.values()
    for block, flat in zip(blocks, ring.flat_weights, strict=True):
        modules = [m for m in frozen_modules(block).values()]
        stored = Layout.from_tensors((str(i), b) for i, b in enumerate(b for m in modules for b in m.buffers()))
        assert flat.numel() == stored.size
        weights = [linear.shape[0] * linear.shape[1] for linear in block.linears().values()]
        assert stored.size < 1.3 * sum(weights) * 22 / 32 + 2**16  # Q5_0: 22 bytes for 32 values
    runs[3].placed.weights.unload()
    # The host holds the blocks once: the MODEL's own tensors lie in the buffers that streamed.
    assert all(
        in_blocks(parameter) == (parameter.dtype == torch.uint8)
        for parameter in model.model.diffusion_model.parameters()
    )


def test_blocks_of_two_formats_are_two_graphs_and_no_more(tmp_path):
    torch._dynamo.reset()
    state, other = flux_state("Q4_0"), flux_state("Q5_1")
    state |= {key: tensor for key, tensor in other.items() if key.startswith("double_blocks.1.")}
    graphs = Graphs()
    trainer = trained(model_of(state), three_pictures(), tmp_path, steps=2, backend="aot_eager")
    assert graphs() == trainer.placed.execution.runner.planned_graphs == 3
    assert trainer.placed.execution.runner.report.counts().graph_breaks == 0


def test_the_memory_plan_counts_what_is_stored(tmp_path):
    counted = {}
    for name in ("Q4_0", "Q8_0"):
        trainer = tiny.make_trainer(model_of(flux_state(name)), three_pictures(), tmp_path / name)
        placed = trainer.placed
        targets = choose_targets(trainer.context.family, trainer.context.patcher.model, trainer.settings.network)
        cost = auto.measure(
            trainer.context.patcher, trainer.context.family, trainer.context.data, targets, trainer.settings
        )
        counted[name] = sum(block.weights for block in cost.blocks)
        block_modules = [frozen_modules(block).values() for _, block in placed.weights.transformer.blocks()]
        real = sum(b.nbytes for modules in block_modules for m in modules for b in m._buffers.values() if b is not None)
        assert real <= counted[name] < 1.1 * real
    linears = [x for n, x in placed.weights.transformer.linears().items() if "_blocks." in n]
    values = sum(x.shape[0] * x.shape[1] for x in linears)
    assert counted["Q8_0"] - counted["Q4_0"] == pytest.approx(values * (34 - 18) / 32, rel=0.01)


ROW = next(row for row in NAMED if row.name == "z-image")


@pytest.mark.parametrize("swapped", [0, 2])
def test_a_model_without_a_forward_of_ours_trains_as_its_values(swapped, tmp_path):
    trainer = trainer_of(
        ROW, tmp_path, "full" if swapped else "none", native_model(ROW, "Q4_0"), blocks_to_swap=swapped
    )
    layouts = [linear.layout for linear in trainer.placed.weights.transformer.linears().values()]
    assert sum(layout is not None for layout in layouts) > len(layouts) / 2
    widened = build(ROW)
    copy_values(native_model(ROW, "Q4_0"), widened)
    fill_up_matrices(trainer)
    expected, gradients = written_out(ROW, trainer, plain_model(widened))
    loss = trainer.train_step.forward_backward([micro_batch(0)])
    assert loss == pytest.approx(expected, rel=1e-5)
    assert difference(lora_gradients(trainer), gradients) <= 1e-5
    trainer.close()


def test_a_format_that_nothing_reads_is_refused_before_anything_is_loaded(tmp_path):
    state = flux_state("Q4_0")
    key = "single_blocks.1.linear2.weight"
    state[key] = stored_tensor(state[key].as_subclass(torch.Tensor), 99, state[key].shape)
    with pytest.raises(ValueError, match="^model holds weights in GGUF's 99, which neither Tessera nor the installed"):
        train(model_of(state), mixed_data(), tmp_path)
    assert not list(tmp_path.iterdir()) and kind_of("Q4_0") == 2


def test_block_swap_for_sampling_leaves_it_to_its_loader():
    message = (
        "model is a GGUF file, whose loader moves weights by itself; leave Block Swap out (ComfyUI streams what "
        "doesn't fit; to train, set blocks_to_swap on Training Memory), or load a safetensors file with Load "
        "Diffusion Model (Block Swap) and quantize at int8."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TesseraBlockSwap.execute(model_of(flux_state("Q4_0")), 2, 1, "auto")

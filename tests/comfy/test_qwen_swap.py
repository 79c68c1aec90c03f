"""Training Qwen-Image with blocks that stream from the host: the same bits, counted copies, no further graph."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tessera.train.settings import MemoryOptions
from tiny import swapping
from tiny.compiling import Graphs
from tiny.qwen_data import qwen_sample
from tiny.runs import training_data
from tiny.swapping import assert_same_run

BLOCKS, STEPS = 4, 3
# The last block's text goes nowhere.
UNUSED = [f"transformer_blocks.{BLOCKS - 1}.{n}" for n in ("attn.add_q_proj", "attn.to_add_out")]
UNUSED += [f"transformer_blocks.{BLOCKS - 1}.txt_mlp.net.{n}" for n in ("0.proj", "2")]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deep") / "qwen.safetensors"
    return tiny.write_qwen_image(path, layers=BLOCKS, timestep_zero=True)


def trained(path: Path, folder: Path, **options: Any) -> Any:
    """A trainer that has made STEPS steps of two samples, whose captions differ in length."""
    shapes = [(4, 4, 5), (2, 8, 60), (8, 2, 128)]
    data = training_data(*(qwen_sample(f"sample {i}", *s, references=[(4, 6)]) for i, s in enumerate(shapes)))
    model = tiny.load_qwen_image(path, torch.float8_e4m3fn if path.stem == "fp8" else None)
    return swapping.trained(model, data, folder, batch=2, steps=STEPS, **options)


@pytest.fixture(scope="module")
def resident(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Any] = {}

    def of(mode: str) -> Any:
        if mode not in made:
            made[mode] = trained(deep, tmp_path_factory.mktemp("resident"), checkpointing=mode)
        return made[mode]

    return of


CASES = [(count, prefetch, "none") for count in range(1, BLOCKS + 1) for prefetch in (1, 2)]
CASES += [(3, 1, "selective"), (4, 2, "selective"), (3, 1, "full"), (4, 3, "full")]


@pytest.mark.parametrize(("count", "prefetch", "mode"), CASES)
def test_swapped_equals_resident_bit_for_bit(deep, resident, tmp_path, count, prefetch, mode):
    plain = resident(mode)
    swapped = trained(deep, tmp_path, checkpointing=mode, blocks_to_swap=count, prefetch_blocks=prefetch)
    assert_same_run(swapped, plain, UNUSED)
    slots = min(prefetch + 1, count)
    # The first forward brings all; after that what is there at the turn, and at the end of a step, stays.
    assert swapped.placed.swap.ring.copies == STEPS * 2 * (count - slots) + slots


@pytest.mark.parametrize("mode", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_compiled_blocks_stay_whole_and_swap_adds_no_graph(deep, tmp_path, mode):
    torch._dynamo.reset()
    settings = {"backend": "aot_eager", "checkpointing": mode}
    plain = trained(deep, tmp_path / "plain", **settings)
    graphs = Graphs()
    swapped = trained(deep, tmp_path / "swapped", blocks_to_swap=3, **settings)
    assert graphs() == plain.placed.runner.planned_graphs == 1
    assert_same_run(swapped, plain, UNUSED)


def test_an_fp8_file_streams_as_it_is_stored(tmp_path):
    fp8 = tiny.write_qwen_image(
        tmp_path / "fp8.safetensors", layers=BLOCKS, timestep_zero=True, dtype=torch.float8_e4m3fn
    )
    resident = trained(fp8, tmp_path / "resident")
    swapped = trained(fp8, tmp_path / "swapped", blocks_to_swap=BLOCKS)
    assert_same_run(swapped, resident, UNUSED)
    (_, block), *_ = swapped.placed.transformer.blocks()
    assert {linear.weight.dtype for linear in block.linears().values()} == {torch.float8_e4m3fn}


def test_activations_may_wait_on_the_host(deep, resident, tmp_path):
    offloaded = trained(deep, tmp_path, checkpointing="full", offload_activations=True, blocks_to_swap=2)
    assert offloaded.placed.runner.offload.bytes_in > 0
    assert_same_run(offloaded, resident("full"), UNUSED)


def test_the_masters_are_never_written_and_stay_the_models_own(deep, tmp_path):
    model = tiny.load_qwen_image(deep)
    before = {key: tensor.clone() for key, tensor in model.model.state_dict().items()}
    memory = MemoryOptions(checkpointing="none", blocks_to_swap=BLOCKS)
    data = training_data(qwen_sample("one", 4, 4))
    trainer = tiny.make_trainer(model, data, tmp_path, steps=2, memory=memory)
    trainer.run()
    after = model.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    # The host holds the weights once: ComfyUI's modules point into the masters, the norms too.
    held = {m.untyped_storage().data_ptr() for m in trainer.placed.swap.ring.flat_weights}
    block = model.model.diffusion_model.transformer_blocks[1]
    for tensor in (block.img_mlp.net[2].weight, block.txt_mod[1].bias, block.attn.norm_added_k.weight):
        assert tensor.untyped_storage().data_ptr() in held


def test_a_plan_is_chosen_by_measuring_a_block(deep, tmp_path):
    automatic = trained(deep, tmp_path, checkpointing="auto", blocks_to_swap=-1)
    assert automatic.placed.automatic is not None and automatic.progress.step == STEPS

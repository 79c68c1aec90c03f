"""Training Wan with blocks that stream from the host: the same bits, counted copies, no further graph."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tessera.train.settings import MemoryOptions
from tiny import swapping
from tiny.compiling import Graphs
from tiny.runs import training_data
from tiny.swapping import assert_same_run

VARIANTS = tuple(tiny.WAN_CHANNELS)
BLOCKS, STEPS = 4, 3


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """By variant in fp32, and 5B once more as a file of fp8."""
    folder = tmp_path_factory.mktemp("deep")
    made: dict[Any, Path] = {v: tiny.write_wan(folder / f"{v}.safetensors", variant=v, layers=BLOCKS) for v in VARIANTS}
    fp8 = tiny.write_wan(folder / "fp8.safetensors", variant="2.2-5b", layers=BLOCKS, dtype=torch.float8_e4m3fn)
    return made | {"fp8": fp8}


def trained(path: Path, folder: Path, variant: str, **options: Any) -> Any:
    """A trainer that has made STEPS steps of two samples."""
    samples = [
        tiny.wan_sample(f"sample {i}", grid, variant, clean_frames=int(variant == "2.2-5b" and i == 0))
        for i, grid in enumerate([(2, 2, 4), (1, 4, 4), (4, 2, 2)])
    ]
    model = tiny.load_wan(path, torch.float8_e4m3fn if path.stem == "fp8" else None)
    return swapping.trained(model, training_data(*samples), folder, batch=2, steps=STEPS, **options)


CASES = [(v, count, 1, mode) for v in VARIANTS for count, mode in ((2, "none"), (4, "none"), (3, "full"))]
CASES += [("2.2-5b", count, prefetch, "none") for count in (1, 3) for prefetch in (1, 2)]
CASES += [("2.2-5b", 4, 2, "selective"), ("2.1-i2v", 4, 3, "selective")]


@pytest.mark.parametrize(("variant", "count", "prefetch", "mode"), CASES)
def test_swapped_equals_resident_bit_for_bit(files, tmp_path, variant, count, prefetch, mode):
    path = files[variant]
    resident = trained(path, tmp_path / "resident", variant, checkpointing=mode)
    swapped = trained(
        path, tmp_path / "swapped", variant, checkpointing=mode, blocks_to_swap=count, prefetch_blocks=prefetch
    )
    assert_same_run(swapped, resident)
    slots = min(prefetch + 1, count)
    # The first forward brings all; after that what is there at the turn, and at the end of a step, stays.
    assert swapped.placed.swap.ring.copies == STEPS * 2 * (count - slots) + slots


def test_an_fp8_file_streams_as_it_is_stored(files, tmp_path):
    resident = trained(files["fp8"], tmp_path / "resident", "2.2-5b")
    swapped = trained(files["fp8"], tmp_path / "swapped", "2.2-5b", blocks_to_swap=BLOCKS)
    assert_same_run(swapped, resident)
    (_, block), *_ = swapped.placed.transformer.blocks()
    assert {linear.weight.dtype for linear in block.linears().values()} == {torch.float8_e4m3fn}
    assert swapped.placed.transformer.patch_embedding.weight.dtype == torch.float32


ONE_EACH = [("2.1-i2v", "none"), ("2.2-5b", "full")]  # and the other pairs by name
OTHERS = [pytest.param(*case, marks=pytest.mark.slow) for case in [("2.1-i2v", "full"), ("2.2-5b", "none")]]


@pytest.mark.parametrize(("variant", "mode"), ONE_EACH + OTHERS)
def test_compiled_blocks_stay_whole_and_swap_adds_no_graph(files, tmp_path, variant, mode):
    torch._dynamo.reset()
    settings = {"backend": "aot_eager", "checkpointing": mode}
    plain = trained(files[variant], tmp_path / "plain", variant, **settings)
    graphs = Graphs()
    swapped = trained(files[variant], tmp_path / "swapped", variant, blocks_to_swap=3, **settings)
    assert graphs() == plain.placed.runner.planned_graphs == 1
    assert_same_run(swapped, plain)


def test_the_masters_are_never_written_and_stay_the_models_own(files, tmp_path):
    model = tiny.load_wan(files["2.1-i2v"])
    before = {key: tensor.clone() for key, tensor in model.model.state_dict().items()}
    memory = MemoryOptions(checkpointing="none", blocks_to_swap=BLOCKS)
    data = training_data(tiny.wan_sample("one", (2, 2, 2), "2.1-i2v"))
    trainer = tiny.make_trainer(model, data, tmp_path, steps=2, memory=memory)
    trainer.run()
    after = model.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    # The host holds the weights once: ComfyUI's modules point into the masters, the modulation too.
    held = {m.untyped_storage().data_ptr() for m in trainer.placed.swap.ring.flat_weights}
    block = model.model.diffusion_model.blocks[1]
    for tensor in (block.ffn[0].weight, block.norm3.bias, block.self_attn.norm_q.weight, block.modulation):
        assert tensor.untyped_storage().data_ptr() in held


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_plan_is_chosen_by_measuring_a_block(files, tmp_path, variant):
    automatic = trained(files[variant], tmp_path, variant, checkpointing="auto", blocks_to_swap=-1)
    assert automatic.placed.automatic is not None and automatic.progress.step == STEPS

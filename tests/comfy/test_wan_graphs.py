"""One graph per (token count, text length) of Wan's one block kind, by dynamo's own counters, over mixed data."""

from typing import Any

import pytest
import tiny
import torch
from tessera.lora.options import NetworkOptions
from tessera.train.settings import MemoryOptions
from tiny.compiling import Graphs, graphs_after_each_step
from tiny.runs import training_data

# Pictures and clips of one to six latent frames in ten shapes, all of 24 tokens; the last four with a ragged edge.
GRIDS = [(1, 4, 6), (1, 3, 8), (1, 6, 4), (2, 3, 4), (2, 2, 6), (3, 4, 2), (4, 3, 2), (6, 2, 2)]
RAGGED = [((1, 5, 5), 24), ((2, 3, 5), 12), ((3, 3, 3), 8), ((1, 4, 7), 24)]
BATCH = 2


def mixed_data(variant: str, text_length: int = 10) -> Any:
    """Captions of two to sixteen tokens; 5B's clips have a clean first frame or none, by turns."""
    shapes = [(grid, grid[1] * grid[2]) for grid in GRIDS] + RAGGED
    samples = []
    for i, (grid, keep) in enumerate(shapes):
        clean = int(variant == "2.2-5b" and grid[0] > 1 and i % 2 == 0)
        samples.append(
            tiny.wan_sample(
                f"sample {i}",
                grid,
                variant,
                keep=keep,
                text=2 + i,
                text_length=text_length,
                clean_frames=clean,
            )
        )
    assert {s.tokens for s in samples} == {24}
    return training_data(*samples)


@pytest.fixture
def wan(tmp_path):
    def load(variant):
        return tiny.load_wan(tiny.write_wan(tmp_path / f"{variant}.safetensors", variant=variant))

    return load


VARIANTS = tuple(tiny.WAN_CHANNELS)
# Each variant once, and each mode once; the rest by name.
QUICK = {(variant, "none") for variant in VARIANTS} | {(VARIANTS[0], "selective"), (VARIANTS[0], "full")}
CASES = [(variant, mode) for variant in VARIANTS for mode in ("none", "selective", "full")]


@pytest.mark.parametrize(
    ("variant", "mode"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_two_epochs_of_clips_and_pictures_compile_one_graph(wan, tmp_path, variant, mode):
    torch._dynamo.reset()
    graphs = Graphs()
    data = mixed_data(variant, text_length=16)
    trainer = tiny.make_trainer(
        wan(variant),
        data,
        tmp_path,
        backend="aot_eager",
        batch_size=BATCH,
        steps=2 * len(data.samples) // BATCH,
        memory=MemoryOptions(checkpointing=mode),
    )

    counts, _ = graphs_after_each_step(trainer, graphs)
    assert counts == [1] * len(data.samples) == [trainer.placed.runner.planned_graphs] * len(counts)
    assert graphs.breaks == 0
    assert trainer.facts()["graphs_compiled"] == 1


def test_captions_of_any_length_share_the_graph_of_512_tokens(wan, tmp_path):
    torch._dynamo.reset()
    graphs = Graphs()
    lengths = [3, 200, 512, 513, 700]
    samples = [tiny.wan_sample(f"{n}", (1, 2, 2), text=n, text_length=n) for n in lengths]
    from tessera.compile.settings import CompileSettings
    from tessera.train.train_lora import train_lora
    from tiny.runs import Watcher, run_settings

    watcher = Watcher()
    settings = run_settings(steps=5, compile="auto", save_every=0)
    result = train_lora(
        wan("2.1-t2v"), training_data(*samples), settings, tmp_path, watcher, CompileSettings("aot_eager")
    )
    assert graphs() == result.summary["graphs_planned"] == result.summary["graphs_compiled"] == 1
    assert any("2 captions have more than 512 tokens" in note for note in watcher.notes)


def test_dropout_masks_have_the_rows_that_each_layer_sees(wan, tmp_path):
    torch._dynamo.reset()
    graphs = Graphs()
    network = NetworkOptions(rank=2, alpha=2.0, dropout=0.5, include=("*",))
    data = mixed_data("2.1-i2v", text_length=16)
    trainer = tiny.make_trainer(
        wan("2.1-i2v"), data, tmp_path, backend="aot_eager", batch_size=BATCH, steps=4, network=network
    )
    trainer.run()
    assert graphs() == 1
    assert all(loss > 0 for loss in trainer.progress.loss)

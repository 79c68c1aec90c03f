"""One graph per block kind, token count and text length, by dynamo's own counters, over a run of mixed pictures."""

from pathlib import Path

import pytest
import tiny
import torch
from PIL import Image
from tessera.data.folders.dataset import Dataset, ImageEntry
from tessera.data.samples import TrainingData
from tessera.train.config.settings import MemoryOptions
from tiny.compile.compiling import Graphs, graphs_after_each_step, graphs_expected
from tiny.data.preparing import prepare

ASPECTS = [1.0, 1.25, 4 / 3, 1.5, 1.6, 16 / 9, 2.0, 0.8, 0.75, 2 / 3, 0.625, 9 / 16]
PICTURES = 40
BATCH = 2
STEPS_PER_EPOCH = PICTURES // BATCH
KINDS = 2


def caption(words: int) -> str:
    return " ".join(["a", "red", "fox", "in", "snow"][i % 5] for i in range(words))


@pytest.fixture(scope="module")
def mixed_data(tmp_path_factory: pytest.TempPathFactory, tiny_files: dict[str, Path]) -> TrainingData:
    """40 pictures of 12 aspect ratios with captions of 3 to 400 tokens, through the real VAE and text encoders."""
    folder = tmp_path_factory.mktemp("pictures")
    pictures = []
    for index in range(PICTURES):
        aspect = ASPECTS[index % len(ASPECTS)]
        height = round((160 * 160 / aspect) ** 0.5)
        path = folder / f"{index:02d}.png"
        Image.effect_noise((round(height * aspect), height), 40 + index).convert("RGB").save(path)
        words = 2 + round(282 * index / (PICTURES - 1))
        pictures.append(ImageEntry(path=path, caption=caption(words), repeats=1, name=path.name))
    prepared = prepare(
        Dataset(tuple(pictures)),
        tiny.load_vae(tiny_files["vae"]),
        tiny.load_clip(tiny_files["clip_l"], tiny_files["t5"]),
        megapixels=160 * 160 / 1024**2,
        max_graphs=1,
        fit="ragged edge",
        max_text_length=512,
        cache_dir=tmp_path_factory.mktemp("cache"),
    )
    return prepared.data


def test_the_data_has_the_shapes_that_are_to_be_counted(mixed_data):
    assert len({s.grid for s in mixed_data.samples}) >= 7
    assert {s.text_length for s in mixed_data.samples} == {256, 512}
    assert len({s.tokens for s in mixed_data.samples}) == 1


def test_two_epochs_of_mixed_pictures_compile_each_graph_once(mixed_data, tiny_flux, tmp_path):
    torch._dynamo.reset()
    counted = Graphs()
    memory = MemoryOptions(checkpointing="selective")
    trainer = tiny.make_trainer(
        tiny_flux, mixed_data, tmp_path, backend="aot_eager", batch_size=BATCH, steps=2 * STEPS_PER_EPOCH, memory=memory
    )
    graphs, keys = graphs_after_each_step(trainer, counted)
    assert len(graphs) == 2 * STEPS_PER_EPOCH
    assert graphs == graphs_expected(KINDS, keys)
    assert graphs[-1] == KINDS * len(mixed_data.graph_keys()) == trainer.placed.execution.runner.planned_graphs
    assert counted.breaks == 0
    assert trainer.summary()["graphs_compiled"] == graphs[-1]


def test_a_resumed_run_compiles_each_graph_once(mixed_data, tiny_flux, tmp_path):
    settings = {
        "backend": "aot_eager",
        "batch_size": BATCH,
        "steps": STEPS_PER_EPOCH,
        "save_every": STEPS_PER_EPOCH // 2,
    }
    first = tiny.make_trainer(tiny_flux, mixed_data, tmp_path, **settings)
    first.run()
    state = first.context.folder.states()[0]
    whole_loss = list(first.progress.loss)
    torch._dynamo.reset()
    counted = Graphs()
    second = tiny.make_trainer(tiny_flux, mixed_data, tmp_path, **settings)
    second.resume(state)
    graphs, keys = graphs_after_each_step(second, counted)
    assert len(keys) == STEPS_PER_EPOCH // 2
    assert graphs == graphs_expected(KINDS, keys)
    assert counted.breaks == 0
    assert second.progress.loss == whole_loss

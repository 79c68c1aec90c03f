"""One graph per (tokens, tokens of references, text length) of Qwen-Image's one block kind, over mixed data."""

from typing import Any

import pytest
import tiny
import torch
from tessera.compile.settings import CompileSettings
from tessera.lora.options import NetworkOptions
from tessera.models.layers import ragged_attention
from tessera.train.settings import MemoryOptions
from tessera.train.train_lora import train_lora
from tiny.compiling import Graphs, graphs_after_each_step, graphs_expected
from tiny.qwen_data import qwen_sample
from tiny.runs import Watcher, run_settings, training_data
from torch.nn.attention import SDPBackend

SHAPES = [(4, 6), (6, 4), (3, 8), (8, 3), (2, 12), (12, 2)]
BATCH = 2


def mixed_data() -> Any:
    """24 pictures of seven shapes, all of 24 tokens, some with a ragged edge; captions of 3 to 245 tokens in two steps
    of the ladder; a third with one reference picture, a third with two."""
    samples = []
    for i in range(24):
        grid, keep = (SHAPES[i % 6], None) if i % 4 else ((5, 5), 24)
        references = [(), [(6, 8)], [(4, 4), (8, 6)]][i % 3]
        if i % 6 >= 3:
            references = [side[::-1] for side in references]
        length = 3 + i if i < 18 else 130 + 5 * i
        method = "offset" if i % 5 == 4 else None
        samples.append(qwen_sample(f"picture {i}", *grid, length, references, method, tokens=keep))
    return training_data(*samples)


@pytest.fixture
def edit(tmp_path):
    return tiny.load_qwen_image(tiny.write_qwen_image(tmp_path / "2511.safetensors", timestep_zero=True))


# Dynamo's graphs and guards are those of every backend; "eager" generates nothing, so that six graphs take seconds.
@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        ("none", "eager"),
        pytest.param("selective", "aot_eager", marks=pytest.mark.slow),
        pytest.param("full", "eager", marks=pytest.mark.slow),
    ],
)
def test_two_epochs_of_mixed_samples_compile_each_graph_once(edit, tmp_path, mode, backend):
    torch._dynamo.reset()
    graphs = Graphs()
    data = mixed_data()
    assert data.graph_keys() == [(24, r, length) for r in ((), (4, 12), (12,)) for length in (128, 256)]
    memory = MemoryOptions(checkpointing=mode)
    trainer = tiny.make_trainer(
        edit, data, tmp_path, backend=backend, batch_size=BATCH, steps=len(data.samples), memory=memory
    )
    counts, keys = graphs_after_each_step(trainer, graphs)
    assert counts == graphs_expected(1, keys)
    assert counts[-1] == len(data.graph_keys()) == trainer.placed.runner.planned_graphs
    assert graphs.breaks == 0


def test_captions_of_many_lengths_are_padded_to_the_steps_of_the_ladder(edit, tmp_path):
    torch._dynamo.reset()
    graphs = Graphs()
    lengths = [1, 7, 127, 128, 129, 200, 256]
    samples = [qwen_sample(f"{n}", 2, 2, n) for n in lengths]
    settings = run_settings(steps=len(lengths), compile="auto", save_every=0)
    result = train_lora(edit, training_data(*samples), settings, tmp_path, Watcher(), CompileSettings("aot_eager"))
    assert graphs() == result.summary["graphs_planned"] == result.summary["graphs_compiled"] == 2


def test_dropout_masks_have_the_rows_that_each_layer_sees(edit, tmp_path):
    torch._dynamo.reset()
    graphs = Graphs()
    network = NetworkOptions(rank=2, alpha=2.0, dropout=0.5, include=("*",))
    samples = [qwen_sample(f"{i}", *SHAPES[i], 5 + i, [(4, 6)]) for i in range(4)]
    trainer = tiny.make_trainer(
        edit, training_data(*samples), tmp_path, backend="aot_eager", batch_size=BATCH, steps=4, network=network
    )
    trainer.run()
    assert graphs() == 1 and all(loss > 0 for loss in trainer.progress.loss)


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
@pytest.mark.parametrize(("mode", "forwards"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_checkpointing_keeps_what_attention_gave(edit, tmp_path, monkeypatch, backend, mode, forwards):
    calls = []
    kernel = ragged_attention._OF_CPU[SDPBackend.FLASH_ATTENTION.value]

    def forward(*tensors: Any) -> Any:
        calls.append(1)
        return kernel.forward(*tensors)

    monkeypatch.setitem(ragged_attention._OF_CPU, SDPBackend.FLASH_ATTENTION.value, kernel._replace(forward=forward))
    data = training_data(qwen_sample("one", 4, 6, 9, [(4, 6)]))
    trainer = tiny.make_trainer(
        edit, data, tmp_path, backend=backend, steps=1, memory=MemoryOptions(checkpointing=mode)
    )
    trainer.run()
    assert len(calls) == 2 * forwards  # two blocks

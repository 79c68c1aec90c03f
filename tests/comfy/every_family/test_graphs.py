"""One graph per kind of block, token counts and text length, by dynamo's own counters, over mixed data."""

from typing import Any

import pytest
import tiny
import torch
from family_cases import cases, every_case, modes_in_turn
from tessera.compile.settings import CompileSettings
from tessera.lora.options import NetworkOptions
from tessera.train.config.settings import MemoryOptions
from tessera.train.train_lora import RunRequest, train_lora
from thinned import one_in
from tiny.compile.compiling import Graphs, graphs_after_each_step, graphs_expected
from tiny.train.runs import Watcher, run_settings, training_data

BATCH = 2


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def main_batch(case: Any) -> Any:
    """Data of one graph key."""
    return training_data(*case.batches()[case.main_batches[-1]]())


# Dynamo's graphs, guards and breaks are those of every backend. AOTAutograd runs where it has a say in checkpointing.
BACKENDS = {"none": "eager", "selective": "aot_eager", "full": "eager"}


@modes_in_turn(list(BACKENDS), "graphs", thin=("chroma", "wan"))
def test_two_epochs_of_mixed_samples_compile_each_graph_once(case_file, tmp_path, case, mode):
    graphs = Graphs()
    data = training_data(*case.mixed())
    assert data.graph_keys() == case.mixed_keys()
    steps = 2 * len(data.samples) // BATCH
    settings = {"batch_size": BATCH, "steps": steps, "memory": MemoryOptions(checkpointing=mode)}
    trainer = tiny.make_trainer(case.load(case_file(case)), data, tmp_path, backend=BACKENDS[mode], **settings)
    counts, keys = graphs_after_each_step(trainer, graphs)
    assert len(counts) == steps
    assert counts == graphs_expected(case.kinds, keys)
    assert counts[-1] == case.kinds * len(data.graph_keys()) == trainer.placed.execution.runner.planned_graphs
    assert graphs.breaks == 0
    assert trainer.summary()["graphs_compiled"] == counts[-1]


@every_case("graphs", fast=True)
def test_a_batch_compiles_one_graph_for_each_kind_of_block(case_file, tmp_path, case):
    graphs = Graphs()
    settings = {"backend": "eager", "batch_size": BATCH, "steps": 2}
    trainer = tiny.make_trainer(case.load(case_file(case)), main_batch(case), tmp_path, **settings)
    trainer.run()
    assert graphs() == trainer.placed.execution.runner.planned_graphs == case.kinds and graphs.breaks == 0


WITH_CAPTIONS = [case for case in cases("graphs") if case.captions()]


@pytest.mark.parametrize("case", one_in(9, WITH_CAPTIONS[::-1]), ids=lambda case: case.name)
def test_captions_of_many_lengths_share_graphs_and_what_is_cut_is_told(case_file, tmp_path, case):
    graphs = Graphs()
    watcher = Watcher()
    captions = case.captions()
    settings = run_settings(steps=len(captions.samples), compile="auto", save_every=0)
    result = train_lora(
        RunRequest(
            case.load(case_file(case)),
            training_data(*captions.samples),
            settings,
            tmp_path,
            watcher,
            CompileSettings("aot_eager"),
        )
    )
    expected = captions.text_lengths * case.kinds
    assert graphs() == result.summary["graphs_planned"] == result.summary["graphs_compiled"] == expected
    assert captions.note is None or any(captions.note in note for note in watcher.notes)


@every_case("graphs", thin=True)
def test_dropout_masks_have_the_rows_that_each_layer_sees(case_file, tmp_path, case):
    graphs = Graphs()
    network = NetworkOptions(rank=2, alpha=2.0, dropout=0.5, include=("*",))
    settings = {"backend": "aot_eager", "batch_size": BATCH, "steps": 4, "network": network}
    trainer = tiny.make_trainer(case.load(case_file(case)), main_batch(case), tmp_path, **settings)
    trainer.run()
    assert graphs() == case.kinds
    assert all(loss > 0 for loss in trainer.progress.loss)

"""Number of graphs that a run compiles: what was planned, which blocks have a LoRA, whether a compiler works."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from tessera.compile.settings import CompileOptions, CompileSettings, parse_overrides
from tessera.models.flux.blocks import DoubleBlock
from tessera.train.report.errors import TrainingStopped
from tessera.train.report.observer import SilentObserver
from thinned import one_in
from tiny.compile.compiling import Graphs


def test_a_shape_that_was_not_planned_is_an_error_with_a_sentence(tiny_flux, tmp_path):
    data = tiny.make_data([(4, 4), (4, 5), (4, 6)], [16, 16, 16])
    trainer = tiny.make_trainer(tiny_flux, data, tmp_path, backend="aot_eager", steps=6)
    trainer.placed.execution.runner = type(trainer.placed.execution.runner)(
        trainer.placed.weights.transformer.blocks(),
        trainer.settings.memory,
        trainer.placed.execution.runner.rules.settings,
        1,
        trainer.device,
    )
    with pytest.raises(RuntimeError, match="needed more graphs than the 2 planned"):
        trainer.run()


def test_blocks_with_and_without_a_lora_are_regions_of_their_own(tiny_flux, tmp_path):
    from tessera.lora.options import NetworkOptions

    network = NetworkOptions(rank=2, alpha=2.0, include=("double_blocks.0.*", "single_blocks.*"))
    data = tiny.make_data([(4, 4)], [16])
    torch._dynamo.reset()
    counted = Graphs()
    trainer = tiny.make_trainer(tiny_flux, data, tmp_path, backend="aot_eager", steps=2, network=network)
    trainer.run()
    assert counted() == trainer.placed.execution.runner.planned_graphs == 3
    assert len(trainer.train_step.clock.steps) == 1  # the step that compiled is not part of the pace


def test_run_without_a_working_compiler_is_eager_and_says_so_once(tiny_flux, tmp_path, no_compiler):
    from tessera.train.report.observer import SilentObserver

    said: list[str] = []

    class Listening(SilentObserver):
        def note(self, text: str) -> None:
            said.append(text)

    torch._dynamo.reset()
    data = tiny.make_data([(4, 4)], [16])
    trainer = tiny.make_trainer(tiny_flux, data, tmp_path, backend="inductor", steps=3)
    tiny.observe(trainer, Listening())
    trainer.run()
    eager = tiny.make_trainer(tiny_flux, data, tmp_path, steps=3)
    eager.run()
    assert [text for text in said if "Compiling failed, so training runs uncompiled" in text] == said and len(said) == 1
    assert trainer.progress.loss == eager.progress.loss


# Compile Model in front of Train LoRA.


class Notes(SilentObserver):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def make(model: Any, folder: Any, compile_settings: CompileSettings | None, **changes: Any) -> tuple[Any, list[str]]:
    """(a trainer with these settings of Compile Model, its notes)."""
    torch._dynamo.reset()
    changes = {"steps": 2, "compile_settings": compile_settings} | changes
    trainer = tiny.make_trainer(model, tiny.make_data([(4, 4)], [16]), folder, **changes)
    tiny.observe(trainer, Notes())
    return trainer, trainer.observer.notes


@pytest.fixture
def eager_losses(tiny_flux: Any, tmp_path: Any) -> list[float]:
    trainer, _ = make(tiny_flux, tmp_path / "eager", None)
    trainer.run()
    return trainer.progress.loss


@pytest.fixture
def double_blocks_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind of block that is not one graph."""
    forward: Callable[..., Any] = DoubleBlock.forward

    def prints(self: Any, *args: Any) -> Any:
        print(end="")
        return forward(self, *args)

    monkeypatch.setattr(DoubleBlock, "forward", prints)


def test_overrides_reach_the_blocks_that_they_name(tiny_flux, tmp_path, eager_losses):
    lines = "double_blocks.0 eager\nsingle_blocks.1 backend=eager mode=max-autotune dynamic=true"
    counted = Graphs()
    trainer, notes = make(tiny_flux, tmp_path, CompileSettings("aot_eager", overrides=parse_overrides(lines)))
    trainer.run()
    settings = {"dynamic": "false", "limit": 1}  # the trainer's
    assert [(report.label, report.options) for report in trainer.placed.execution.runner.report.regions[:-1]] == [
        ("double, LoRA 2", CompileOptions("aot_eager", **settings)),
        ("single, LoRA 3", CompileOptions("aot_eager", **settings)),
        ("single, LoRA 4", CompileOptions("eager", "max-autotune", **settings)),
    ]
    assert counted() == trainer.placed.execution.runner.planned_graphs == 3
    assert trainer.progress.loss == pytest.approx(eager_losses, rel=1e-5) and notes == []


def test_a_kind_of_block_that_cannot_be_compiled_trains_eager_alone(
    tiny_flux, tmp_path, double_blocks_print, eager_losses
):
    trainer, notes = make(tiny_flux, tmp_path, CompileSettings("aot_eager"))
    trainer.run()
    (note,) = notes
    assert note.startswith("double, LoRA 1 blocks can't be compiled, so they run uncompiled: ")
    assert "The code prints or logs in the middle, which ends a graph" in note
    double, single, _ = trainer.placed.execution.runner.report.regions
    assert (double.compiled_calls, double.eager_calls) == (0, 2 * 2)  # two blocks, two steps
    assert (single.compiled_calls, single.eager_calls) == (2 * 2 * 2, 0)  # forward, and computed again
    assert trainer.placed.execution.runner.planned_graphs == 1
    assert trainer.train_step.retries.environment["backend"] == "aot_eager"
    assert trainer.progress.loss == pytest.approx(eager_losses, rel=1e-5)


@pytest.mark.parametrize(
    "settings", one_in(2, [{"overrides": "double_blocks.* fullgraph=true"}, {"fullgraph": True}]), ids=str
)
def test_with_fullgraph_a_break_is_the_error_that_was_asked_for(tiny_flux, tmp_path, double_blocks_print, settings):
    settings = settings | {"overrides": parse_overrides(settings.get("overrides", ""))}
    trainer, notes = make(tiny_flux, tmp_path, CompileSettings("aot_eager", **settings))
    with pytest.raises(TrainingStopped) as stopped:
        trainer.run()
    sentence = str(stopped.value)
    assert sentence.startswith("fullgraph is on, but double, LoRA 1 blocks can't be compiled as one graph: ")
    assert '`print(end="")`' in sentence and "Switch fullgraph off on Compile Model." in sentence
    assert sentence.endswith("Nothing was trained yet.") and notes == []


def test_fullgraph_does_not_make_a_missing_compiler_an_error(tiny_flux, tmp_path, no_compiler, eager_losses):
    trainer, notes = make(tiny_flux, tmp_path, CompileSettings(fullgraph=True))
    trainer.run()
    assert len(notes) == 1 and notes[0].startswith("Compiling failed, so training runs uncompiled")
    assert trainer.progress.loss == eager_losses

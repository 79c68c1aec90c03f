"""What decides how many graphs a run compiles: what was planned, which blocks have a LoRA, whether a compiler works."""

import pytest
import tiny
import torch
from tiny.compiling import Graphs


def test_a_shape_that_was_not_planned_is_an_error_with_a_sentence(tiny_flux, tmp_path):
    data = tiny.make_data([(4, 4), (4, 5), (4, 6)], [16, 16, 16])
    trainer = tiny.make_trainer(tiny_flux, data, tmp_path, backend="aot_eager", steps=6)
    trainer.placed.runner = type(trainer.placed.runner)(
        trainer.placed.transformer.blocks(),
        trainer.settings.memory,
        trainer.placed.runner.compile_settings,
        1,
        trainer.device,
    )
    with pytest.raises(RuntimeError, match="More graphs were needed than the 2 planned"):
        trainer.run()


def test_blocks_with_and_without_a_lora_are_regions_of_their_own(tiny_flux, tmp_path):
    from tessera.lora.options import NetworkOptions

    network = NetworkOptions(rank=2, alpha=2.0, include=("double_blocks.0.*", "single_blocks.*"))
    data = tiny.make_data([(4, 4)], [16])
    torch._dynamo.reset()
    counted = Graphs()
    trainer = tiny.make_trainer(tiny_flux, data, tmp_path, backend="aot_eager", steps=2, network=network)
    trainer.run()
    assert counted() == trainer.placed.runner.planned_graphs == 3


def test_without_a_working_compiler_it_trains_eager_and_says_so_once(tiny_flux, tmp_path, no_compiler):
    from tessera.train.observer import SilentObserver

    said: list[str] = []

    class Listening(SilentObserver):
        def note(self, text: str) -> None:
            said.append(text)

    torch._dynamo.reset()
    data = tiny.make_data([(4, 4)], [16])
    trainer = tiny.make_trainer(tiny_flux, data, tmp_path, backend="inductor", steps=3)
    trainer.observer = Listening()
    trainer.run()
    eager = tiny.make_trainer(tiny_flux, data, tmp_path, steps=3)
    eager.run()
    assert [text for text in said if "does not work on this machine" in text] == said and len(said) == 1
    assert trainer.progress.loss == eager.progress.loss

"""Models of ComfyUI's own forward take all that goes with training: resume, Block Swap, Compile Model, Compare."""

from typing import Any

import pytest
import torch
from tessera.memory.weights.frozen import unload
from tessera.models.catalogue.swapped_model import SwapSettings, swap
from tessera.nodes.train.run import run
from tessera.train.preview.compare import AppliedLora, Column, compare
from tessera.train.preview.sampling import Sampling, Stages
from tiny.compile.compiling import Graphs, compiled, make_lora, with_lora
from tiny.models.sampling import sample_prompts
from tiny.native import ROWS, build, data_of
from tiny.native.latents import Latents
from tiny.train.resuming import resumed_as_whole
from tiny.train.runs import Watcher, run_settings

BY_NAME = {row.name: row for row in ROWS}
Z_IMAGE = BY_NAME["z-image"]


@pytest.mark.parametrize("name", ["z-image", "sdxl", "ltx-2"])
def test_a_run_that_was_cut_short_goes_on_to_the_same_bits(name, tmp_path):
    """LTX-2 is given noised silence, which has to be that of the step."""
    network = {"dropout": 0.2}
    resumed_as_whole(build(BY_NAME[name]), data_of(BY_NAME[name]), tmp_path, network=network, steps=5)


def prompt_of(row: Any) -> tuple[list[list[Any]], torch.Tensor]:
    read = data_of(row, 1).samples[0].load()
    return [[read.text, dict(read.conditioning)]], torch.zeros(1, *row.latent)


def sampled(model: Any, row: Any = Z_IMAGE) -> torch.Tensor:
    positive, empty = prompt_of(row)
    latent = sample_prompts(model, positive, positive, empty)
    unload([model])
    return latent


@pytest.mark.parametrize("name", ["z-image", "sdxl", "krea-2"])
def test_block_swap_and_compile_model_sample_as_the_model_alone(name):
    torch._dynamo.reset()
    row = BY_NAME[name]
    expected = sampled(build(row), row)
    swapped, notes = swap(build(row), SwapSettings(2))
    assert torch.equal(sampled(swapped, row), expected), notes
    graphs = Graphs()
    actual = sampled(compiled(swapped)[0], row)
    assert graphs() > 0 and (actual - expected).norm() <= 1e-5 * expected.norm()


def test_training_takes_block_swap_and_compile_model_from_the_model(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr("tessera.nodes.train.run.runs_folder", lambda: tmp_path)
    settings = run_settings(steps=2, compile="auto", save_every=0)
    plain = run(build(Z_IMAGE), data_of(Z_IMAGE), run_settings(steps=2, output_name="plain"), Watcher(), {})
    swapped, _ = swap(build(Z_IMAGE), SwapSettings(2))
    result = run(compiled(swapped)[0], data_of(Z_IMAGE), settings, Watcher(), {})
    assert result.summary["blocks_swapped"] == 2
    assert result.summary["graphs_compiled"] > 0 and not result.summary["graph_breaks"]
    assert result.loss == pytest.approx(plain.loss, rel=1e-5)


def test_compare_shows_what_comfyui_samples_with_each_lora():
    positive, empty = prompt_of(Z_IMAGE)
    lora, vae = make_lora(build(Z_IMAGE), inside="layers."), Latents()
    sampling = Sampling(vae, positive, steps=2, seed=0, latent_image={"samples": empty})
    columns = [Column("none"), Column("lora", AppliedLora("a lora", 0.7, lambda: lora))]
    with torch.inference_mode():
        compare(Stages(build(Z_IMAGE)), [sampling], columns, lambda: None, lambda: None)
    plain, with_adapter = vae.decoded
    assert torch.equal(plain, sampled(build(Z_IMAGE)))
    assert torch.equal(with_adapter, sampled(with_lora(build(Z_IMAGE), lora, 0.7))) and not torch.equal(
        with_adapter, plain
    )

"""Runs over FLUX.2, and over FLUX.1 with reference pictures: graphs counted, block swap equal to none, a LoRA that
learns, judged by ComfyUI's own forward and sampler."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tessera.compile.settings import CompileSettings
from tessera.lora.options import NetworkOptions
from tessera.train.settings import MemoryOptions
from tessera.train.train_lora import train_lora
from tiny import swapping
from tiny.compiling import Graphs, graphs_after_each_step, graphs_expected
from tiny.flux_data import flux_sample
from tiny.learning import WHOLE, assert_draws, assert_loss_falls, core_loss, drawn_from_noise, with_lora
from tiny.runs import Watcher, run_settings, train, training_data
from tiny.swapping import assert_same_run

SHAPES = [(4, 6), (6, 4), (3, 8), (8, 3), (2, 12), (12, 2)]
METHODS = {"flux": (None, "offset", "uxo"), "flux2": (None, "index_timestep_zero", "offset")}
LOAD = {"flux": tiny.load_flux, "flux2": tiny.load_flux2}
WRITE = {"flux": tiny.write_flux, "flux2": tiny.write_flux2}
KINDS, BATCH = 2, 2


def mixed_data(family: str) -> Any:
    """12 pictures of seven shapes, all of 24 tokens, some with a ragged edge; a third has one reference, a third two,
    placed by three methods. FLUX.2's captions are all of 512 tokens, FLUX.1's here of 16."""
    samples = []
    for i in range(12):
        grid, keep = (SHAPES[i % 6], None) if i % 4 else ((5, 5), 24)
        references = [(), [(6, 8)], [(4, 4), (8, 6)]][i % 3]
        if i % 6 >= 3:
            references = [side[::-1] for side in references]
        text = 3 + 20 * i if family == "flux2" else 16
        method = METHODS[family][i % 5 % 3]
        samples.append(flux_sample(f"{i}", *grid, text, references, family=family, method=method, tokens=keep))
    return training_data(*samples)


# Dynamo's graphs and guards are those of every backend; "eager" generates nothing, so that six graphs take seconds.
REST = [("flux", "full"), ("flux2", "none"), ("flux2", "selective"), ("flux2", "full")]


@pytest.mark.parametrize(
    ("family", "mode", "backend"),
    [
        ("flux2", "selective", "eager"),
        *(pytest.param(family, mode, "aot_eager", marks=pytest.mark.slow) for family, mode in REST),
    ],
)
def test_two_epochs_of_mixed_samples_compile_each_graph_once(tiny_files, tmp_path, family, mode, backend):
    torch._dynamo.reset()
    graphs = Graphs()
    data = mixed_data(family)
    assert [key[1] for key in data.graph_keys()] == (
        [(), (4, 12), (12,)] if family == "flux" else [(), (16, 48), (48,)]
    )
    memory = MemoryOptions(checkpointing=mode)
    steps = 2 * len(data.samples) // BATCH
    model = LOAD[family](tiny_files[family])
    trainer = tiny.make_trainer(model, data, tmp_path, backend=backend, batch_size=BATCH, steps=steps, memory=memory)
    counts, keys = graphs_after_each_step(trainer, graphs)
    assert counts == graphs_expected(KINDS, keys)
    assert counts[-1] == KINDS * len(data.graph_keys()) == trainer.placed.runner.planned_graphs
    assert graphs.breaks == 0


def test_captions_of_many_lengths_share_the_graphs_of_512_tokens_and_longer_ones_are_told(tiny_files, tmp_path):
    torch._dynamo.reset()
    graphs, watcher = Graphs(), Watcher()
    data = training_data(*(flux_sample(f"{n}", 2, 2, n) for n in (1, 200, 512, 513)))
    settings = run_settings(steps=4, compile="auto", save_every=0)
    model = tiny.load_flux2(tiny_files["flux2"])
    result = train_lora(model, data, settings, tmp_path, watcher, CompileSettings("aot_eager"))
    assert graphs() == result.summary["graphs_planned"] == result.summary["graphs_compiled"] == 2 * KINDS
    assert any("1 captions have more than 512 tokens" in note for note in watcher.notes)


def test_dropout_masks_have_the_rows_that_each_layer_sees(tiny_files, tmp_path):
    network = NetworkOptions(rank=2, alpha=2.0, dropout=0.5, include=("*",))
    for family in ("flux", "flux2"):
        data = training_data(*(flux_sample(f"{i}", *SHAPES[i], 9, [(4, 6)], family=family) for i in range(4)))
        model = LOAD[family](tiny_files[family])
        trainer = tiny.make_trainer(model, data, tmp_path / family, batch_size=BATCH, steps=2, network=network)
        trainer.run()
        assert all(loss > 0 for loss in trainer.progress.loss)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("deep")
    return {f: write(folder / f"{f}.safetensors", depth=2, depth_single=3) for f, write in WRITE.items()}


def trained(path: Path, folder: Path, family: str, **options: Any) -> Any:
    """A trainer that has made three steps of two samples with a reference each."""
    shapes = enumerate(swapping.THREE_SHAPES)
    methods = METHODS[family]
    data = training_data(*(flux_sample(f"{i}", *s, 9, [(4, 6)], family=family, method=methods[i]) for i, s in shapes))
    return swapping.trained(LOAD[family](path), data, folder, batch=2, steps=3, **options)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["flux", "flux2"])
def test_swapped_equals_resident_bit_for_bit(deep, tmp_path, family, checkpointing):
    plain = trained(deep[family], tmp_path / "plain", family, checkpointing=checkpointing)
    for count, prefetch in ((1, 1), (2, 1), (4, 2), (5, 1), (5, 3)):
        memory = {"checkpointing": checkpointing, "blocks_to_swap": count, "prefetch_blocks": prefetch}
        swapped = trained(deep[family], tmp_path / f"{count} {prefetch}", family, **memory)
        assert_same_run(swapped, plain)
        slots = min(prefetch + 1, count)
        assert swapped.placed.swap.ring.copies == 3 * 2 * (count - slots) + slots


@pytest.mark.parametrize("family", [pytest.param("flux", marks=pytest.mark.slow), "flux2"])
def test_swap_adds_no_graph(deep, tmp_path, family):
    torch._dynamo.reset()
    graphs = Graphs()
    settings = {"backend": "aot_eager", "checkpointing": "full"}
    plain = trained(deep[family], tmp_path / "plain", family, **settings)
    assert graphs() == KINDS
    swapped = trained(deep[family], tmp_path / "swapped", family, blocks_to_swap=4, **settings)
    assert graphs() == 2 * KINDS  # a run compiles its own
    assert_same_run(swapped, plain)


@pytest.fixture
def quiet_klein(tmp_path) -> Any:
    """A model that carries its input through to its output, beside quiet blocks, so that 200 steps suffice."""
    path = tiny.write_flux2(tmp_path / "klein.safetensors", guidance=False, depth=1, depth_single=1, hidden=256)
    tensors = load_file(path)
    identity = torch.eye(256, 128)
    tensors["img_in.weight"] = 0.02 * tensors["img_in.weight"] + identity
    tensors["final_layer.linear.weight"] = 0.02 * tensors["final_layer.linear.weight"] + identity.T
    for name in tensors:
        if name.endswith(("_attn.proj.weight", "_mlp.2.weight", "linear2.weight", "adaLN_modulation.1.weight")):
            tensors[name] = 0.2 * tensors[name]
    save_file(tensors, path, {"format": "pt"})
    return tiny.load_flux2(path)


@pytest.mark.slow
def test_training_on_one_edit_lowers_its_loss_and_makes_the_sampler_draw_it(quiet_klein, tmp_path):
    """The picture is of one colour."""
    sample = flux_sample("the picture", 2, 2, references=[(2, 2)])
    tensors = sample.load()
    tensors.latent.copy_(tensors.latent[:, :1, :1].expand_as(tensors.latent).clone())
    result = train(
        quiet_klein,
        training_data(sample),
        tmp_path / "loras",
        steps=200,
        save_every=0,
        network=WHOLE,
        optimizer={"learning_rate": 2e-3, "lr_scheduler": "cosine"},
    )
    learned = with_lora(quiet_klein, result)
    assert_loss_falls(lambda model, sigma: core_loss(model, tensors, sigma), quiet_klein, learned)
    assert_draws(lambda m: drawn_from_noise(m, tensors), tensors.latent, (quiet_klein, learned), near=0.35, far=0.9)
    assert result.lora.metadata["modelspec.architecture"] == "Flux.2-klein/lora"

"""Several sizes in one run: the same data set as with one where it is one, one graph a size, and resume bit for bit."""

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from tessera.data.folders.dataset import scan_images
from tessera.data.preparation.prepare import summary
from tessera.train.config.settings import ValidationOptions
from tessera.train.placement.auto import measure
from tessera.train.preflight.validation_split import hold_out
from tiny.compile.compiling import Graphs
from tiny.data.preparing import prepare
from tiny.train.resuming import resumed_as_whole
from tiny.train.runs import run_settings

PHOTOS = {"a": (128, 128), "b": (96, 160), "c": (160, 112), "small": (64, 64)}  # width, height
LARGE, SMALL = 128 * 128 / 1024**2, 64 * 64 / 1024**2


@pytest.fixture(scope="module")
def prepared(tiny_files, tmp_path_factory):
    """A function: sizes → the prepared data; one cache for all."""
    folder, cache = tmp_path_factory.mktemp("photos"), tmp_path_factory.mktemp("cache")
    draw = np.random.default_rng(0)
    for name, (width, height) in PHOTOS.items():
        Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a picture of {name}")
    vae, clip = tiny.load_vae(tiny_files["vae"]), tiny.load_clip(tiny_files["clip_l"], tiny_files["t5"])

    def run(megapixels, *more, cache_dir=cache):
        options = {"megapixels": megapixels, "more_megapixels": more, "max_graphs": 1, "fit": "ragged edge"}
        return prepare(scan_images(folder), vae, clip, cache_dir, max_text_length=512, **options)

    return run


def files(folder):
    return {path.name for path in folder.rglob("*.safetensors")}


def test_data_and_cache_without_more_sizes_are_as_before(prepared, tmp_path):
    first = prepared(LARGE, cache_dir=tmp_path / "a")
    again = prepared(LARGE, LARGE, cache_dir=tmp_path / "b")
    assert first.data.fingerprint == again.data.fingerprint == prepared(LARGE).data.fingerprint
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert [sample.name for sample in first.data.samples] == [f"{name}.png" for name in PHOTOS]
    assert "more_megapixels" not in first.data.made_with


def test_two_sizes_are_the_samples_of_each_and_are_told(prepared, tmp_path):
    large, small = prepared(LARGE), prepared(SMALL)
    both = prepared(LARGE, SMALL)
    at = {sample.name: sample for sample in both.data.samples}
    assert list(at) == [
        *(f"{name}.png at {LARGE:g} megapixels" for name in "abc"),
        *(f"{name}.png at {SMALL:g} megapixels" for name in PHOTOS),
    ]
    assert {sample.file for sample in both.data.samples} == {f"{name}.png" for name in PHOTOS}
    assert torch.equal(at[f"a.png at {SMALL:g} megapixels"].load().latent, small.data.samples[0].load().latent)
    assert both.data.fingerprint not in (large.data.fingerprint, small.data.fingerprint)
    assert both.data.made_with["more_megapixels"] == [SMALL]
    assert len({sample.tokens for sample in both.data.samples}) == 2 == len(both.data.graph_keys())
    (note,) = [note for note in both.notes if "too small" in note]
    assert note.endswith(": small.png.")
    text = summary(both)
    assert text.startswith("Pictures: 4. At 2 sizes that makes 7 to train on. One epoch shows 7, repeats included.")
    assert (
        f"Size of {SMALL:g} megapixels: {both.data.samples[-1].tokens} tokens" in text
        and "The pictures have 2 shapes" in text
    )
    # A picture leaves for validation at all of its sizes.
    trained, held = hold_out(both.data, ValidationOptions(part=0.25))
    assert len({sample.file for sample in held.samples}) == 1
    assert not {sample.file for sample in held.samples} & {sample.file for sample in trained.samples}


def test_two_sizes_compile_one_graph_each_and_memory_is_that_of_the_larger(prepared, tiny_flux, tmp_path):
    torch._dynamo.reset()
    data, counted = prepared(LARGE, SMALL).data, Graphs()
    trainer = tiny.make_trainer(tiny_flux, data, tmp_path, backend="eager", batch_size=2, steps=7)
    trainer.run()
    sizes = {sample.tokens for sample in data.samples}
    assert counted() == trainer.placed.execution.runner.planned_graphs == 2 * len(sizes) == 4
    trainer.close()
    targets = list(trainer.context.targets)
    measured = measure(tiny_flux.clone(), trainer.context.family, data, targets, run_settings())
    assert {shape[1] for shape in measured.shapes.values()} <= {max(sizes), max(sizes) + 256}


def test_a_cancelled_run_at_two_sizes_goes_on_to_the_same_result(prepared, tiny_flux, tmp_path):
    resumed_as_whole(tiny_flux, prepared(LARGE, SMALL).data, tmp_path, steps=6, gradient_accumulation=2)

"""Preparing pictures with control pictures, for each edit model, against core's nodes."""

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from tessera.data.buckets.grids import Grid, crop_box
from tessera.data.folders.dataset import scan_images
from tessera.data.media.images import load_image
from tessera.data.preparation.prepare import summary
from tiny.data.image_encoders import load_flux2_vae, load_klein_clip, load_seeing_qwen_clip
from tiny.data.preparing import prepare

OPTIONS = {
    "megapixels": 0.006,
    "max_graphs": 1,
    "fit": "ragged edge",
    "max_text_length": 512,
    "control_megapixels": 0.0046875,  # 4096 + 819.2 pixels: 18 or 20 tokens of 16 x 16
}
SIZES = {"a": (96, 64), "b": (64, 96), "c": (80, 80)}  # width, height


def write_picture(path, width, height, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path):
    """Three pictures: `a` with one control picture, `b` with two, `c` with one of another shape than its own."""
    for index, (name, (width, height)) in enumerate(SIZES.items()):
        write_picture(tmp_path / "after" / f"{name}.png", width, height, index)
        (tmp_path / "after" / f"{name}.txt").write_text(f"make (it) {name}")
    for index, (name, size) in enumerate((("a", (96, 64)), ("b_0", (64, 96)), ("b_1", (60, 50)), ("c", (200, 90)))):
        write_picture(tmp_path / "before" / f"{name}.png", *size, 10 + index)
    return tmp_path / "after"


@pytest.fixture(scope="module")
def models(tiny_files):
    return {
        "qwen": (tiny.load_vae(tiny_files["wan_vae"]), load_seeing_qwen_clip(tiny_files["qwen"])),
        "flux": (tiny.load_vae(tiny_files["vae"]), tiny.load_clip(tiny_files["clip_l"], tiny_files["t5"])),
        "flux2": (load_flux2_vae(), load_klein_clip()),
    }


def run(folder, model, tmp_path, controls=True, **changes):
    vae, clip = model
    dataset = scan_images(folder, control_folder=folder.parent / "before" if controls else None)
    with torch.inference_mode():
        return prepare(dataset, vae, clip, cache_dir=tmp_path / "cache", **{**OPTIONS, **changes})


def test_control_pictures_of_the_same_size_follow_each_size(folder, models, tmp_path):
    large, small = OPTIONS["megapixels"], OPTIONS["megapixels"] / 2
    alike = run(folder, models["flux"], tmp_path, control_megapixels=large, more_megapixels=(small,))
    alone = run(folder, models["flux"], tmp_path, megapixels=small, control_megapixels=small)
    references = {sample.name: sample.references for sample in alike.data.samples}
    for sample in alone.data.samples:
        assert references[f"{sample.name} at {small:g} megapixels"] == sample.references
        assert sum(references[f"{sample.name} at {large:g} megapixels"]) > sum(sample.references)
    fixed = run(folder, models["flux"], tmp_path, more_megapixels=(small,))
    assert len({sample.references for sample in fixed.data.samples if sample.name.startswith("a.png")}) == 1


def control_sizes(folder, sample):
    """The path and the size of each control picture of a sample."""
    names = {"a": ["a"], "b": ["b_0", "b_1"], "c": ["c"]}[sample.name[0]]
    for path in (folder.parent / "before" / f"{name}.png" for name in names):
        if path.exists():
            with Image.open(path) as image:
                yield path, (image.height, image.width)


def control_pixels(folder, sample):
    """The control pictures of a sample, on those whole grids of their token count that keep most of them."""
    pictures = []
    for (path, size), tokens in zip(control_sizes(folder, sample), sample.references, strict=True):
        grids = [Grid(rows, tokens // rows) for rows in range(1, tokens + 1) if tokens % rows == 0]
        ratios = {grid: min(ratio := size[1] * grid.height / size[0] / grid.width, 1 / ratio) for grid in grids}
        box, target = crop_box(size, max(grids, key=ratios.__getitem__), 16)
        pictures.append(load_image(path, box, *target))
    return pictures


@pytest.mark.parametrize("name", ["qwen", "flux", "flux2"])
def test_control_pictures_are_reference_latents_of_whole_grids_as_core_encodes_them(folder, models, tmp_path, name):
    from comfy_extras.nodes_edit_model import ReferenceLatent

    vae, _ = models[name]
    prepared = run(folder, models[name], tmp_path)
    (tokens,) = {count for sample in prepared.data.samples for count in sample.references}
    assert [sample.references for sample in prepared.data.samples] == [(tokens,), (tokens, tokens), (tokens,)]
    for sample in prepared.data.samples:
        tensors = sample.load()
        actual = tensors.conditioning["reference_latents"]
        conditioning = [[tensors.text, {}]]
        with torch.inference_mode():
            for pixels in control_pixels(folder, sample):
                latent = {"samples": vae.encode(pixels)}
                (conditioning,) = ReferenceLatent.execute(conditioning, latent).result
        expected = conditioning[0][1]["reference_latents"]
        assert len(actual) == len(expected) == len(sample.references)
        for reference, other in zip(actual, expected, strict=True):
            assert torch.equal(reference, other) and not reference.is_inference()
        assert "reference_latents" in sample.conditioning == frozenset(tensors.conditioning)
    text = prepared.data.samples[0].text_length
    reference = prepared.data.samples[0].tokens
    assert prepared.data.graph_keys()[0] == (reference, (tokens,), text)
    counts = ", ".join(
        f"{n} + {' + '.join(map(str, references))} + {length}"
        for n, references, length in sorted({(s.tokens, s.references, s.text_length) for s in prepared.data.samples})
    )
    assert f"(tokens of image + control + text: {counts})" in summary(prepared)


@pytest.mark.parametrize("fit", ["ragged edge", "whole grids"])
def test_control_pictures_of_their_results_shape_and_size_are_cropped_as_those_are(folder, models, tmp_path, fit):
    vae, _ = models["flux"]
    prepared = run(folder, models["flux"], tmp_path, fit=fit, control_megapixels=OPTIONS["megapixels"])
    for sample, name in zip(prepared.data.samples[:2], ("a", "b_0"), strict=True):
        width, height = SIZES[name[0]]
        grid = Grid(*sample.grid[1:])
        box, target = crop_box((height, width), grid, 16)
        with torch.inference_mode():
            expected = vae.encode(load_image(folder.parent / "before" / f"{name}.png", box, *target))
        assert torch.equal(sample.load().conditioning["reference_latents"][0], expected)
        assert sample.references[0] == grid.tokens
    assert any(note.startswith("Control pictures take ") for note in prepared.notes)
    assert "Control pictures take " in summary(prepared)


def test_qwen_captions_see_the_control_pictures_as_core_text_encode_qwen_image_edit_plus_shows_them(
    folder, models, tmp_path
):
    from comfy_extras.nodes_qwen import TextEncodeQwenImageEditPlus

    _, clip = models["qwen"]
    for sample in run(folder, models["qwen"], tmp_path).data.samples:
        tensors = sample.load()
        with torch.inference_mode():
            pictures = control_pixels(folder, sample)
            images = {f"image{index + 1}": pixels for index, pixels in enumerate(pictures)}
            ((cond, _),) = TextEncodeQwenImageEditPlus.execute(clip, f"make (it) {sample.name[0]}", **images).result[0]
        assert torch.equal(tensors.text, cond)
        assert sample.text_length >= cond.shape[1] and sample.text_length in (256, 512)


def test_the_first_edit_model_has_its_own_caption_and_takes_one_control_picture(folder, models, tmp_path, monkeypatch):
    from comfy_extras import nodes_qwen
    from tessera.models.qwen_image import text

    # A megapixel takes a minute to look at on a CPU.
    monkeypatch.setattr(nodes_qwen, "int", lambda value: int(value) // 64, raising=False)
    monkeypatch.setitem(text.SEEN_AREA, text.FIRST_EDIT, 1024 * 1024 // 64)
    with pytest.raises(
        ValueError,
        match=r"edit_prompt is 'first edit', which takes one control picture, and there are several for: b.png; choose",
    ):
        run(folder, models["qwen"], tmp_path, edit_prompt="first edit")
    assert not (tmp_path / "cache").exists()
    (folder.parent / "before" / "b_1.png").unlink()
    plus = run(folder, models["qwen"], tmp_path).data
    first = run(folder, models["qwen"], tmp_path, edit_prompt="first edit").data
    assert plus.fingerprint != first.fingerprint
    for sample in first.samples:
        tensors = sample.load()
        with torch.inference_mode():
            (pixels,) = control_pixels(folder, sample)
            text = f"make (it) {sample.name[0]}"
            (((cond, _),),) = nodes_qwen.TextEncodeQwenImageEdit.execute(models["qwen"][1], text, image=pixels).result
        assert torch.equal(tensors.text, cond)


@pytest.mark.parametrize("name", ["flux", "flux2"])
def test_other_edit_models_read_the_caption_alone(folder, models, tmp_path, name):
    _, clip = models[name]
    with_controls, blind = (
        run(folder, models[name], tmp_path, controls=controls).data.samples for controls in (True, False)
    )
    for sample, other in zip(with_controls, blind, strict=True):
        assert torch.equal(sample.load().text, other.load().text) and other.references == ()
        if name == "flux2":
            assert sample.text_length == 512 and sample.load().conditioning["attention_mask"].shape == (1, 512)


def test_a_changed_control_picture_encodes_it_and_its_caption_again(folder, models, tmp_path, monkeypatch):
    vae, clip = models["qwen"]
    encoded, captions = [], []
    encode, read = vae.encode, clip.encode_from_tokens
    monkeypatch.setattr(vae, "encode", lambda pixels: encoded.append(1) or encode(pixels))
    monkeypatch.setattr(clip, "encode_from_tokens", lambda *args, **kw: captions.append(1) or read(*args, **kw))
    fingerprint = run(folder, models["qwen"], tmp_path).data.fingerprint
    assert (len(encoded), len(captions)) == (7, 3)
    assert run(folder, models["qwen"], tmp_path).data.fingerprint == fingerprint
    assert (len(encoded), len(captions)) == (7, 3)
    write_picture(folder.parent / "before" / "a.png", 96, 64, 99)
    after = run(folder, models["qwen"], tmp_path).data.fingerprint
    assert (len(encoded), len(captions)) == (8, 4) and after != fingerprint
    run(folder, models["qwen"], tmp_path, control_megapixels=0.0075)
    assert len(encoded) == 12 and len(captions) == 7
    # A control picture of the size of its result is one and the same file, encoded once.
    write_picture(folder.parent / "before" / "c.png", *SIZES["c"], 2)
    same_grids = run(folder, models["qwen"], tmp_path, fit="whole grids", megapixels=0.0075, control_megapixels=0.0075)
    latents = same_grids.data.samples[2].load()
    assert torch.equal(latents.latent[None], latents.conditioning["reference_latents"][0])


@pytest.mark.parametrize("controls", [True, False])
def test_captions_at_which_the_text_encoder_stops_are_named_before_any_picture_is_encoded(
    folder, models, tmp_path, monkeypatch, controls
):
    for name in "ac":
        (folder / f"{name}.txt").write_text("a fox <|endoftext|> in the snow")
    encoded = []
    monkeypatch.setattr(models["qwen"][0], "encode", lambda pixels: encoded.append(pixels))
    with pytest.raises(
        ValueError, match=r"The captions of a.png, c.png hold the text '<\|endoftext\|>', at which Qwen-Image's text"
    ):
        run(folder, models["qwen"], tmp_path, controls=controls)
    assert not encoded and not (tmp_path / "cache").exists()


def test_a_model_without_control_pictures_refuses_them(folder, models, tiny_files, tmp_path):
    vae, _ = models["qwen"]
    wan = (vae, tiny.load_wan_clip(tiny_files["umt5"]))
    with pytest.raises(ValueError, match=r"Wan takes no control pictures, and 'a.png' has one; set control_folder to"):
        run(folder, wan, tmp_path)
    assert not (tmp_path / "cache").exists()


def test_pictures_with_and_without_control_pictures_mix(folder, models, tmp_path):
    write_picture(tmp_path / "plain" / "d.png", 96, 64, 50)
    (tmp_path / "plain" / "d.txt").write_text("nothing before it")
    vae, clip = models["qwen"]
    dataset = scan_images(folder, control_folder=folder.parent / "before") + scan_images(tmp_path / "plain")
    with torch.inference_mode():
        data = prepare(dataset, vae, clip, cache_dir=tmp_path / "cache", **OPTIONS).data
    assert [len(sample.references) for sample in data.samples] == [1, 2, 1, 0]
    assert data.samples[3].text_length == 128 and data.samples[3].conditioning == frozenset()

"""Masks, flips and crops: each form of a picture is what core's VAE gives of those pixels, and its mask is of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from tessera.data.buckets.grids import Grid, crop_box
from tessera.data.captions.options import CaptionOptions
from tessera.data.folders.dataset import scan_images, scan_videos
from tessera.data.folders.options import FolderOptions
from tessera.data.loader import choose_variant
from tessera.data.media.clip_windows import Extraction
from tessera.data.media.images import load_image, load_mask
from tessera.data.media.videos import inspect_video, load_frames
from tessera.data.samples import SampleVariant
from tiny.data.films import write_film
from tiny.data.image_encoders import load_seeing_qwen_clip
from tiny.data.preparing import prepare
from tiny.train.runs import train

SIZES = {"a": (160, 64), "b": (64, 96)}  # width, height
OPTIONS = {"megapixels": 0.004, "max_graphs": 1, "fit": "ragged edge", "max_text_length": 512}


def write_picture(path: Path, width: int, height: int, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path):
    for seed, (name, size) in enumerate(SIZES.items()):
        write_picture(tmp_path / "set" / f"{name}.png", *size, seed)
        write_picture(tmp_path / "masks" / f"{name}.png", *size, 10 + seed)
        write_picture(tmp_path / "before" / f"{name}.png", *size, 20 + seed)
        (tmp_path / "set" / f"{name}.txt").write_text(f"a {name}, left")
    return tmp_path / "set"


def run(dataset, vae, clip, tmp_path, **changes):
    with torch.inference_mode():
        return prepare(dataset, vae, clip, cache_dir=tmp_path / "cache", **{**OPTIONS, **changes})


def windows(size, placement, places):
    """The boxes of the largest windows at these places, and the size in pixels that they are scaled to."""
    crops = [crop_box(size, placement.grid, 16, 1.0, (place, place)) for place in places]
    return [box for box, _ in crops], crops[0][1]


def test_each_form_is_the_vae_of_its_own_pixels_and_its_mask_the_mean_of_its_own(folder, tiny_vae, tiny_clip, tmp_path):
    treatment = FolderOptions(flip="horizontal", crops=2, unmasked_weight=0.1)
    dataset = scan_images(folder, mask_folder=tmp_path / "masks", options=treatment)
    prepared = run(dataset, tiny_vae, tiny_clip, tmp_path)
    wide, tall = prepared.data.samples
    assert wide.image_variants == 4
    placement, size = prepared.plans[0].plan.placements[0], (64, 160)
    boxes, target = windows(size, placement, (0.0, 1.0))
    whole = load_mask(tmp_path / "masks" / "a.png", alpha=False)
    for form in range(4):
        box, flip = boxes[form % 2], form >= 2
        pixels = load_image(folder / "a.png", box, *target)
        tensors = wide.load(SampleVariant(form))
        with torch.inference_mode():
            expected = tiny_vae.encode(pixels.flip(2) if flip else pixels)[0]
        assert torch.equal(tensors.latent, expected)
        # A token's square of the mask at a hundredfold resolution.
        fine = Image.fromarray(whole[:, round(box[0]) : round(box[2])])
        grid = placement.grid
        rows = np.asarray(fine.resize((grid.width * 40, grid.height * 40), Image.Resampling.NEAREST))
        mean = rows.reshape(grid.height, 40, grid.width, 40).mean(axis=(1, 3))
        mean = mean[:, ::-1] if flip else mean
        weights = 0.1 + 0.9 * mean.reshape(-1)[: wide.tokens]
        assert tensors.weights is not None and tensors.weights.shape == (wide.tokens,)
        assert tensors.weights.numpy() == pytest.approx(weights, abs=0.05)
        assert abs(tensors.weights.numpy() - weights).mean() < 0.02
    latents = [wide.load(SampleVariant(form)).latent for form in range(4)]
    assert len({latent.numpy().tobytes() for latent in latents}) == 4
    assert torch.equal(wide.load().latent, latents[0])
    assert any("pictures or clips have masks" in note for note in prepared.notes)
    forms = sum(sample.image_variants for sample in prepared.data.samples)
    assert f"2 pictures or clips are encoded mirrored or in several crops, {forms} versions in total." in prepared.notes
    (warning,) = [note for note in prepared.notes if note.startswith("These captions say left or right,")]
    assert "a.png, b.png" in warning
    plain = run(scan_images(folder), tiny_vae, tiny_clip, tmp_path).data
    assert plain.fingerprint != prepared.data.fingerprint
    assert plain.samples[0].load().weights is None and plain.samples[0].image_variants == 1
    assert plain.graph_keys() == prepared.data.graph_keys()
    # Each form is drawn as often as the others, and again in the same order.
    forms_drawn = [choose_variant(wide, 5, (step, 0), 0).image for step in range(2000)]
    assert forms_drawn == [choose_variant(wide, 5, (step, 0), 0).image for step in range(2000)]
    assert all(abs(forms_drawn.count(form) - 500) < 4 * (2000 * 0.25 * 0.75) ** 0.5 for form in range(4))


def test_control_pictures_and_what_the_text_encoder_sees_of_them_go_along(folder, tiny_files, tmp_path):
    vae, clip = tiny.load_vae(tiny_files["wan_vae"]), load_seeing_qwen_clip(tiny_files["qwen"])
    dataset = scan_images(folder, control_folder=tmp_path / "before", options=FolderOptions(flip="horizontal", crops=2))
    options = {"fit": "whole grids", "control_megapixels": OPTIONS["megapixels"]}
    prepared = run(dataset, vae, clip, tmp_path, **options)
    sample, placement = prepared.data.samples[0], prepared.plans[0].plan.placements[0]
    assert sample.image_variants == 4
    (box, _), target = windows((64, 160), placement, (0.0, 1.0))
    texts = []
    for form, flip in ((0, False), (2, True)):
        tensors = sample.load(SampleVariant(form))
        pixels = load_image(tmp_path / "before" / "a.png", box, *target)
        with torch.inference_mode():
            expected = vae.encode(pixels.flip(2) if flip else pixels)
        assert torch.equal(tensors.conditioning["reference_latents"][0], expected)
        texts.append(tensors.text)
    assert texts[0].shape == texts[1].shape and not torch.equal(*texts)


def test_one_mask_serves_all_frames_of_a_clip_which_is_mirrored_whole(tiny_files, tmp_path):
    vae, clip = tiny.load_vae(tiny_files["wan_vae"]), tiny.load_wan_clip(tiny_files["umt5"])
    (tmp_path / "films").mkdir()
    draw = np.random.default_rng(3)
    frames = [draw.integers(0, 256, (48, 80, 3), dtype=np.uint8) for _ in range(9)]
    film = write_film(tmp_path / "films" / "a.mp4", frames, size=(48, 80), caption="a film")
    (tmp_path / "masks").mkdir()
    mask = np.zeros((48, 80), np.uint8)
    mask[:, :40] = 255
    Image.fromarray(mask).save(tmp_path / "masks" / "a.png")
    treatment = FolderOptions(flip="horizontal")
    dataset = scan_videos(tmp_path / "films", Extraction((9,), 0.0), mask_folder=tmp_path / "masks", options=treatment)
    (sample,) = run(dataset, vae, clip, tmp_path, fit="whole grids").data.samples
    assert sample.image_variants == 2 and sample.grid[0] == 3
    plain, mirrored = sample.load(SampleVariant(0)), sample.load(SampleVariant(1))
    frames, height, width = sample.grid
    for tensors, side in ((plain, 0), (mirrored, -1)):
        weights = tensors.weights.reshape(frames, height, width)
        assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
        assert (weights[:, :, side] == 1).all() and (weights[:, :, -1 - side] == 0).all()
    facts = inspect_video(film)
    box, target = crop_box((48, 80), Grid(height, width), 16)
    pixels = load_frames(film, facts, facts.stamps, box, *target)
    with torch.inference_mode():
        assert torch.equal(plain.latent, vae.encode(pixels)[0])
        assert torch.equal(mirrored.latent, vae.encode(pixels.flip(2))[0])


def test_a_zoom_without_pixels_to_spare_is_said_to_do_nothing_and_not_asked_for(folder, tiny_vae, tiny_clip, tmp_path):
    def notes_of(zoom, megapixels):
        dataset = scan_images(folder, options=FolderOptions(crops=2, crop_zoom=zoom))
        notes = run(dataset, tiny_vae, tiny_clip, tmp_path, megapixels=megapixels).notes
        return [note for note in notes if "crop_zoom" in note]

    (small,) = notes_of(1.5, 0.02)
    assert small.startswith("crop_zoom has no effect on a.png, b.png, which are too small to zoom into")
    assert not notes_of(1.5, 0.001)
    (unzoomed,) = notes_of(1.0, 0.006)
    assert unzoomed.startswith("These are hardly cropped, so several crops would be the same: ")


def test_crops_that_a_mask_leaves_nothing_of_are_left_out_and_a_picture_of_none_is_refused(
    folder, tiny_vae, tiny_clip, tmp_path
):
    mask = np.zeros((64, 160), np.uint8)
    mask[:, 110:] = 255
    Image.fromarray(mask).save(tmp_path / "masks" / "a.png")
    dataset = scan_images(folder, mask_folder=tmp_path / "masks", options=FolderOptions(crops=2))
    prepared = run(dataset, tiny_vae, tiny_clip, tmp_path)
    sample = prepared.data.samples[0]
    (_, right), target = windows((64, 160), prepared.plans[0].plan.placements[0], (0.0, 1.0))
    assert sample.image_variants == 1
    message = "Some crops or mirrored versions are left out, because the mask covers all of them: a.png (1)."
    assert message in prepared.notes and not [note for note in prepared.notes if "crop: a.png" in note]
    with torch.inference_mode():
        expected = tiny_vae.encode(load_image(folder / "a.png", right, *target))[0]
    assert torch.equal(sample.load().latent, expected)
    for name in "ab":
        Image.new("L", SIZES[name], 0).save(tmp_path / "masks" / f"{name}.png")
    dataset = scan_images(folder, mask_folder=tmp_path / "masks")
    with pytest.raises(ValueError, match=r"nothing to learn: a.png \(mask\), b.png \(mask\); paint"):
        run(dataset, tiny_vae, tiny_clip, tmp_path)
    dataset = scan_images(folder, mask_folder=tmp_path / "masks", options=FolderOptions(unmasked_weight=0.5))
    assert run(dataset, tiny_vae, tiny_clip, tmp_path).data.samples[0].load().weights.unique().tolist() == [0.5]


@pytest.mark.parametrize("unmasked", [0.0, 0.5])
def test_a_mask_of_label_numbers_is_refused_by_name_from_the_cache_too(unmasked, folder, tiny_vae, tiny_clip, tmp_path):
    treatment = FolderOptions(unmasked_weight=unmasked)
    dataset = scan_images(folder, mask_folder=tmp_path / "masks", options=treatment)
    labels = np.zeros((64, 160), np.uint8)
    labels[8:40, 40:120] = 1
    Image.fromarray(labels).save(tmp_path / "masks" / "a.png")
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"almost black everywhere \(below 2% of white\): a.png \(mask\); paint what"
        ):
            run(dataset, tiny_vae, tiny_clip, tmp_path)
    labels[0, 60] = 255  # one bright pixel, whose token is as dark as the others
    Image.fromarray(labels).save(tmp_path / "masks" / "a.png")
    assert run(dataset, tiny_vae, tiny_clip, tmp_path).data.samples


def test_an_alpha_channel_is_the_mask_of_a_picture_that_is_shown_as_if_it_had_none(
    folder, tiny_vae, tiny_clip, tmp_path
):
    picture = Image.open(folder / "b.png").convert("RGBA")
    alpha = np.zeros((96, 64), np.uint8)
    alpha[:48] = 255
    picture.putalpha(Image.fromarray(alpha))
    with pytest.raises(ValueError, match=r"alpha_mask is on and 2 of 2 pictures have no alpha channel: a.png, b.png"):
        run(scan_images(folder, options=FolderOptions(alpha_mask=True)), tiny_vae, tiny_clip, tmp_path)
    opaque = run(scan_images(folder), tiny_vae, tiny_clip, tmp_path).data.samples[1].load()
    (folder / "a.png").unlink()
    picture.save(folder / "b.png")
    dataset = scan_images(folder, options=FolderOptions(alpha_mask=True))
    (sample,) = run(dataset, tiny_vae, tiny_clip, tmp_path).data.samples
    tensors = sample.load()
    assert torch.equal(tensors.latent, opaque.latent)
    _, height, width = sample.grid
    weights = torch.cat((tensors.weights, torch.zeros(height * width - sample.tokens))).reshape(height, width)
    assert (weights[0] == 1).all() and (weights[-1] == 0).all()


def test_class_captions_are_encoded_as_core_does_in_the_length_of_their_own(folder, tiny_vae, tiny_clip, tmp_path):
    long = "a man " * 150
    options = CaptionOptions(caption_per_line=True, caption_dropout=0.5)
    (folder / "a.txt").write_text("red\nblue")
    dataset = scan_images(
        folder, trigger_words="ohwx", options=FolderOptions(class_word=long, flip="horizontal"), captions=options
    )
    prepared = run(dataset, tiny_vae, tiny_clip, tmp_path)
    sample = prepared.data.samples[0]
    assert sample.class_caption and sample.caption_variants == 2 and sample.text_length == 512
    for index, text in enumerate(("red", "blue")):
        plain, tensors = sample.load(SampleVariant(1, index)), sample.load(SampleVariant(1, index, class_caption=True))
        assert plain.class_prompt is None and torch.equal(plain.latent, tensors.latent)
        assert torch.equal(plain.text, tensors.text) and tensors.text.shape[1] == 512
        with torch.inference_mode():
            tokens = tiny_clip.tokenize(f"{long.strip()}, {text}")
            ((cond, extra),) = tiny_clip.encode_from_tokens_scheduled(tokens)
        padded = tensors.class_prompt.text
        assert padded.shape[1] == 512 and tensors.class_prompt.conditioning.keys() == tensors.conditioning.keys()
        assert torch.equal(tensors.class_prompt.conditioning["pooled_output"], extra["pooled_output"])
        assert cond.shape[1] < 512  # core pads to 256 at least, training to 512
    assert sample.load(SampleVariant(0, None, class_caption=True)).class_prompt is None  # the empty prompt
    without_class = run(scan_images(folder, trigger_words="ohwx", captions=options), tiny_vae, tiny_clip, tmp_path).data
    assert without_class.fingerprint != prepared.data.fingerprint and not without_class.samples[0].class_caption


def test_the_empty_prompt_is_encoded_where_it_is_preserved(folder, tiny_vae, tiny_clip, tmp_path):
    dataset = scan_images(folder, options=FolderOptions(blank_prompt_preservation=True))
    sample = run(dataset, tiny_vae, tiny_clip, tmp_path).data.samples[0]
    with torch.inference_mode():
        ((cond, _),) = tiny_clip.encode_from_tokens_scheduled(tiny_clip.tokenize(""))
    assert sample.class_caption and torch.equal(sample.load(SampleVariant(class_caption=True)).class_prompt.text, cond)


def test_the_empty_caption_is_encoded_on_request_and_leaves_all_else_as_it_was(
    folder, tiny_vae, tiny_clip, tiny_flux, tmp_path
):
    (folder / "a.txt").write_text("a house " * 150)
    dataset = scan_images(folder)
    plain = run(dataset, tiny_vae, tiny_clip, tmp_path)
    contents = {path: path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    with_empty = run(dataset, tiny_vae, tiny_clip, tmp_path, encode_empty_caption=True)
    assert with_empty.data.fingerprint == plain.data.fingerprint and with_empty.notes == plain.notes
    assert all(path.read_bytes() == content for path, content in contents.items())
    tokens = tiny_clip.tokenize("")
    with torch.inference_mode():
        ((cond, extra),) = tiny_clip.encode_from_tokens_scheduled(tokens)
    lengths = set()
    for item, other in zip(with_empty.data.samples, plain.data.samples, strict=True):
        assert item == replace(other, empty_length=item.empty_length) and other.empty_length == 0
        read = item.load(SampleVariant(empty_caption=True))
        assert item.load().empty_prompt is None and torch.equal(read.text, other.load().text)
        assert read.empty_prompt.text.shape[1] == item.empty_length == item.text_length  # FLUX.1 sees its pads
        assert torch.equal(read.empty_prompt.conditioning["pooled_output"], extra["pooled_output"])
        if item.text_length == cond.shape[1]:
            assert torch.equal(read.empty_prompt.text, cond)
        lengths.add(item.empty_length)
    assert lengths == {256, 512}
    dropped = scan_images(folder, captions=CaptionOptions(caption_dropout=0.5))
    default, encoded = (
        run(dropped, tiny_vae, tiny_clip, tmp_path, encode_empty_caption=guided_run).data
        for guided_run in (False, True)
    )
    assert default.fingerprint == encoded.fingerprint and default.samples == encoded.samples
    assert all(sample.empty_length for sample in default.samples)
    guided_run = train(
        tiny_flux, with_empty.data, tmp_path, steps=2, objective={"guidance_loss_scale": 1.7, "guidance": 3.5}
    )
    plain_run = train(tiny_flux, with_empty.data, tmp_path, steps=2, objective={"guidance": 3.5})
    assert guided_run.loss[0] != plain_run.loss[0]


def test_prepared_class_captions_train(folder, tiny_vae, tiny_clip, tiny_flux, tmp_path):
    dataset = scan_images(folder, trigger_words="ohwx", options=FolderOptions(class_word="man", flip="horizontal"))
    data = run(dataset, tiny_vae, tiny_clip, tmp_path).data
    preserved = train(tiny_flux, data, tmp_path, steps=2, objective={"preservation_weight": 1.0})
    plain = train(tiny_flux, data, tmp_path, steps=2)
    # The LoRA starts at zero, where the class caption's output is that of the model: only the second step differs.
    assert preserved.loss[0] == plain.loss[0] and preserved.loss[1] > plain.loss[1]

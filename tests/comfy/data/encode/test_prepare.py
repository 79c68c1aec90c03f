"""Preparing: what is encoded equals what core's nodes would give, once and only once, and bad inputs are told first."""

import os
import shutil
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from tessera.common.fingerprint import weights_fingerprint
from tessera.data import cache
from tessera.data.buckets.grids import crop_box
from tessera.data.buckets.planner import plan_buckets
from tessera.data.folders.dataset import Dataset, scan_images
from tessera.data.folders.options import FolderOptions
from tessera.data.media import integrity
from tessera.data.media.images import load_image
from tessera.data.preparation.prepare import summary
from tiny.data.preparing import prepare

SIZES = {"a": (96, 64), "b": (64, 96), "c": (70, 70), "d": (64, 200)}  # width, height
CAPTIONS = {"a": "a red fox", "b": "a (very) small house", "c": "a red fox", "d": "tree " * 300}
OPTIONS = {"megapixels": 0.01, "max_graphs": 1, "fit": "whole grids", "max_text_length": 512}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for name, (width, height) in SIZES.items():
        Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(CAPTIONS[name])
    return folder


class Counted:
    """The encoder's own method, with what it was called with."""

    def __init__(self, monkeypatch, owner, method):
        self.calls = []
        original = getattr(owner, method)

        def call(*args, **kwargs):
            self.calls.append(args)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, method, call)

    def since_last(self):
        count = len(self.calls)
        self.calls.clear()
        return count


@pytest.fixture
def counts(tiny_vae, tiny_clip, monkeypatch):
    return Counted(monkeypatch, tiny_vae, "encode"), Counted(monkeypatch, tiny_clip, "encode_from_tokens")


def run(folder, vae, clip, tmp_path, **changes):
    dataset = folder if isinstance(folder, Dataset) else scan_images(folder, repeats=2)
    return prepare(dataset, vae, clip, cache_dir=tmp_path / "cache", **{**OPTIONS, **changes})


def test_samples_hold_what_core_encodes_of_the_cropped_picture_and_of_the_caption(
    folder, tiny_vae, tiny_clip, tmp_path
):
    with torch.inference_mode():  # as ComfyUI runs nodes
        prepared = run(folder, tiny_vae, tiny_clip, tmp_path)
        loaded = [sample.load() for sample in prepared.data.samples]
    for sample, tensors, placement, size in zip(
        prepared.data.samples, loaded, prepared.plans[0].plan.placements, prepared.plans[0].sizes, strict=True
    ):
        _, height, width = sample.grid
        assert sample.tokens == height * width == prepared.plans[0].plan.token_counts[0]
        assert sample.repeats == 2
        box, target = crop_box(size, placement.grid, 16)
        assert target == (height * 16, width * 16)
        with torch.inference_mode():
            latent = tiny_vae.encode(load_image(folder / sample.name, box, *target))
        assert torch.equal(tensors.latent, latent[0]) and tensors.latent.shape == (16, height * 2, width * 2)
        assert tensors.text.shape[1] == sample.text_length == (512 if sample.name == "d.png" else 256)
        if sample.name in ("a.png", "c.png"):
            ((cond, extra),) = tiny_clip.encode_from_tokens_scheduled(tiny_clip.tokenize("a red fox"))
            assert torch.equal(tensors.text, cond) and tensors.text.dtype == cond.dtype
            assert torch.equal(tensors.conditioning["pooled_output"], extra["pooled_output"])
        for tensor in (tensors.latent, tensors.text, tensors.conditioning["pooled_output"]):
            assert not tensor.is_inference()
            weight = torch.ones((), requires_grad=True)
            (tensor.float() * weight).sum().backward()
    assert prepared.data.graph_keys() == [(sample.tokens, (), 256), (sample.tokens, (), 512)]
    text = summary(prepared)
    assert "d.png" not in text and f"{sample.tokens} tokens" in text
    shapes = f"{sample.tokens} + 256, {sample.tokens} + 512"
    assert f"The pictures have 2 shapes (tokens of image + text: {shapes}); the model is compiled for each." in text


def test_each_picture_and_each_distinct_caption_is_encoded_once_and_an_unchanged_data_set_not_again(
    folder, tiny_vae, tiny_clip, counts, tmp_path, monkeypatch
):
    vae_calls, clip_calls = counts
    shutil.copy(folder / "a.png", folder / "copy.png")
    shutil.copy(folder / "b.txt", folder / "copy.txt")
    first = run(folder, tiny_vae, tiny_clip, tmp_path)
    assert (vae_calls.since_last(), clip_calls.since_last()) == (4, 3)
    import comfy.model_management

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(comfy.model_management, "load_models_gpu", load)
    repeated = run(folder, tiny_vae, tiny_clip, tmp_path)
    assert (vae_calls.since_last(), clip_calls.since_last()) == (0, 0)
    assert repeated.data.fingerprint == first.data.fingerprint
    assert torch.equal(first.data.samples[1].load().latent, repeated.data.samples[1].load().latent)


def test_a_changed_caption_encodes_that_caption_and_a_changed_picture_that_picture(
    folder, tiny_vae, tiny_clip, counts, tmp_path
):
    vae_calls, clip_calls = counts
    original = run(folder, tiny_vae, tiny_clip, tmp_path).data
    vae_calls.since_last(), clip_calls.since_last()

    (folder / "b.txt").write_text("a large house")
    after = run(folder, tiny_vae, tiny_clip, tmp_path).data
    assert (vae_calls.since_last(), clip_calls.since_last()) == (0, 1)
    assert after.fingerprint != original.fingerprint
    assert not torch.equal(after.samples[1].load().text, original.samples[1].load().text)

    # The same size and the same second: only the bytes tell.
    stat = (folder / "c.png").stat()
    Image.new("RGB", SIZES["c"], (200, 30, 30)).save(folder / "c.png")
    os.utime(folder / "c.png", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    run(folder, tiny_vae, tiny_clip, tmp_path)
    assert (vae_calls.since_last(), clip_calls.since_last()) == (1, 0)


def test_changed_weights_or_a_lora_on_the_clip_encode_again_with_that_model_only(
    folder, tiny_vae, tiny_clip, tiny_files, counts, tmp_path, monkeypatch
):
    import comfy.weight_adapter
    import tiny

    vae_calls, clip_calls = counts
    original = run(folder, tiny_vae, tiny_clip, tmp_path).data
    vae_calls.since_last(), clip_calls.since_last()

    patched = tiny_clip.clone()
    key = "clip_l.transformer.text_model.encoder.layers.0.mlp.fc1.weight"
    weight = patched.cond_stage_model.state_dict()[key]
    adapter = comfy.weight_adapter.LoRAAdapter(
        {key}, (torch.ones(weight.shape[0], 1), torch.ones(1, weight.shape[1]), 1.0, None, None, None)
    )
    assert patched.add_patches({key: adapter}, 0.5) == [key]
    patched_calls = Counted(monkeypatch, patched, "encode_from_tokens")
    with_lora = run(folder, tiny_vae, patched, tmp_path).data
    assert (vae_calls.since_last(), patched_calls.since_last()) == (0, 3)
    pooled = [data.samples[0].load().conditioning["pooled_output"] for data in (original, with_lora)]
    assert not torch.equal(*pooled)
    # The patched weights lie in the model now, yet the CLIP without the LoRA is still known.
    run(folder, tiny_vae, tiny_clip, tmp_path)
    assert (vae_calls.since_last(), clip_calls.since_last()) == (0, 0)

    other_vae = tiny.load_vae(tiny_files["vae"])
    with torch.no_grad():
        other_vae.first_stage_model.taesd_encoder[0].weight[0, 0, 1, 1] += 1e-2
    other_calls = Counted(monkeypatch, other_vae, "encode")
    run(folder, other_vae, tiny_clip, tmp_path)
    assert (other_calls.since_last(), clip_calls.since_last()) == (4, 0)


def test_a_clip_that_ends_at_another_layer_encodes_the_captions_again(
    folder, tiny_vae, tiny_clip, counts, tmp_path, monkeypatch
):
    vae_calls, _ = counts
    original = run(folder, tiny_vae, tiny_clip, tmp_path).data.samples[0].load()
    vae_calls.since_last()
    earlier = tiny_clip.clone()
    earlier.clip_layer(-2)
    clip_calls = Counted(monkeypatch, earlier, "encode_from_tokens")
    after = run(folder, tiny_vae, earlier, tmp_path).data.samples[0].load()
    assert (vae_calls.since_last(), clip_calls.since_last()) == (0, 3)
    ((cond, _),) = earlier.encode_from_tokens_scheduled(earlier.tokenize("a red fox"))
    assert torch.equal(after.text, cond) and not torch.equal(after.text, original.text)


def test_broken_cache_files_are_made_again_and_a_vanished_one_is_told(folder, tiny_vae, tiny_clip, counts, tmp_path):
    vae_calls, clip_calls = counts
    data = run(folder, tiny_vae, tiny_clip, tmp_path).data
    expected = [sample.load() for sample in data.samples]
    vae_calls.since_last(), clip_calls.since_last()
    files = sorted((tmp_path / "cache").rglob("*.safetensors"))
    assert len(files) == 7
    assert data.preparation.seconds > 0 and "of a picture is cropped on average" in data.preparation.cropping
    assert data.preparation.cache_bytes == sum(file.stat().st_size for file in files)
    assert run(folder, tiny_vae, tiny_clip, tmp_path).data.preparation.seconds == 0
    vae_calls.since_last(), clip_calls.since_last()
    for file in files:
        file.write_bytes(file.read_bytes()[:-5])
    data = run(folder, tiny_vae, tiny_clip, tmp_path).data
    assert (vae_calls.since_last(), clip_calls.since_last()) == (4, 3)
    for sample, tensors in zip(data.samples, expected, strict=True):
        assert torch.equal(sample.load().latent, tensors.latent) and torch.equal(sample.load().text, tensors.text)
    for file in files:
        file.unlink()
    with pytest.raises(ValueError, match=r"encoded data of 'a.png' is gone from the cache folder; free"):
        data.samples[0].load()


def test_cancel_ends_between_two_pictures_and_keeps_what_is_encoded(
    folder, tiny_vae, tiny_clip, counts, tmp_path, monkeypatch
):
    class Cancelled(BaseException):
        pass

    vae_calls, clip_calls = counts
    progress_calls = []

    def interrupted():
        if len(vae_calls.calls) == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        run(folder, tiny_vae, tiny_clip, tmp_path, interrupted=interrupted)
    vae_calls.since_last()
    monkeypatch.setattr(cache, "time", SimpleNamespace(monotonic=count(0, 3).__next__))
    run(folder, tiny_vae, tiny_clip, tmp_path, progress=lambda *args: progress_calls.append(args))
    assert (vae_calls.since_last(), clip_calls.since_last()) == (2, 3)
    assert (1, 2, "Encoding pictures: 1 of 2, about 3 s left") in progress_calls
    assert progress_calls[-1] == (3, 3, "Encoding captions: 3 of 3")


def test_a_caption_beyond_the_longest_length_is_cut_and_named(folder, tiny_vae, tiny_clip, tmp_path):
    prepared = run(folder, tiny_vae, tiny_clip, tmp_path, max_text_length=256)
    length = len(tiny_clip.tokenize(CAPTIONS["d"].strip())["t5xxl"][0])
    assert prepared.notes == (
        f"These captions are longer than 256 tokens, so their end is cut off: d.png ({length - 256} tokens).",
    )
    assert {sample.text_length for sample in prepared.data.samples} == {256}
    assert prepared.notes[0] in summary(prepared)
    said = prepared.data.made_with
    assert said["max_text_length"] == 256 and [folder_entry["repeats"] for folder_entry in said["folders"]] == [2]


def test_a_picture_that_changes_between_planning_and_encoding_is_refused_and_not_cached(
    folder, tiny_vae, tiny_clip, tmp_path
):
    def progress(count, total, text):
        if text.startswith("Encoding pictures: 0"):
            Image.new("RGB", SIZES["c"], (200, 30, 30)).save(folder / "c.png")

    with pytest.raises(ValueError, match=r"'c.png' was changed while the data set was prepared; queue again"):
        run(folder, tiny_vae, tiny_clip, tmp_path, progress=progress)
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 2  # a and b
    run(folder, tiny_vae, tiny_clip, tmp_path)


def test_captions_are_tokenised_once_each_with_progress_and_can_be_cancelled(
    folder, tiny_vae, tiny_clip, tmp_path, monkeypatch
):
    class Cancelled(BaseException):
        pass

    messages = []

    def interrupted():
        if messages and messages[-1] == (1, 3, "Reading captions: 1 of 3"):
            raise Cancelled

    with pytest.raises(Cancelled):
        run(
            folder, tiny_vae, tiny_clip, tmp_path, interrupted=interrupted, progress=lambda *args: messages.append(args)
        )
    assert not (tmp_path / "cache").exists()
    calls = Counted(monkeypatch, tiny_clip.tokenizer.t5xxl, "tokenizer")
    run(folder, tiny_vae, tiny_clip, tmp_path)
    assert calls.since_last() == 3


def test_a_disk_that_is_too_small_is_told_before_anything_is_encoded(
    folder, tiny_vae, tiny_clip, counts, tmp_path, monkeypatch
):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=16_000_000))
    with pytest.raises(ValueError, match=r"takes about 0.02 GB, but the disk .*/cache in .* has 0.02 GB free; free"):
        run(folder, tiny_vae, tiny_clip, tmp_path)
    assert not counts[0].calls and not (tmp_path / "cache").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=18_000_000))
    run(folder, tiny_vae, tiny_clip, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    run(folder, tiny_vae, tiny_clip, tmp_path)  # all there: nothing is needed


@pytest.mark.parametrize("site", ["device", "host"])
def test_a_picture_that_the_vae_could_only_encode_in_tiles_is_refused_and_not_cached(
    site, folder, tiny_vae, tiny_clip, tmp_path, monkeypatch
):
    model = tiny_vae.first_stage_model
    whole = tiny_vae.first_stage_model.encode
    tiles = []

    def encode(pixels):
        if pixels.shape[-1] > pixels.shape[-2]:
            if site == "host":
                return torch.empty(2**58)  # the allocator's own error
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return whole(pixels)

    monkeypatch.setattr(model, "encode", encode)
    monkeypatch.setattr(tiny_vae, "encode_tiled_", lambda pixels: tiles.append(pixels))
    # a.png is the first wide one.
    with pytest.raises(Exception, match=r"ran out of memory encoding 'a.png' at \d+ x \d+ pixels; lower") as error:
        run(folder, tiny_vae, tiny_clip, tmp_path)
    assert isinstance(error.value, torch.cuda.OutOfMemoryError)  # so that core unloads its models
    assert not tiles and not list((tmp_path / "cache").rglob("*.safetensors"))


def test_notes_tell_what_was_left_out(folder, tiny_vae, tiny_clip, tmp_path):
    (folder / "e.heic").write_bytes(b"1")
    prepared = run(folder, tiny_vae, tiny_clip, tmp_path, fit="ragged edge", max_graphs=2)
    assert prepared.notes == (
        "Left out, because these file types can't be read: e.heic; save them as PNG or JPEG, or install pillow-heif.",
    )
    assert prepared.data.notes == prepared.notes


def test_the_order_and_the_repeats_change_the_fingerprint(folder, tiny_vae, tiny_clip, tmp_path):
    pictures = scan_images(folder).entries
    sets = [pictures, pictures[::-1], scan_images(folder, repeats=3).entries]
    names = {run(Dataset(s), tiny_vae, tiny_clip, tmp_path).data.fingerprint for s in sets}
    assert len(names) == 3


def test_the_buckets_suit_what_is_shown_most_often(folder, tiny_vae, tiny_clip, tmp_path):
    pictures = scan_images(folder).entries
    often = [replace(entry, repeats=40, options=FolderOptions(sample_ratio=0.5)) for entry in pictures]
    options = {"pixels_per_token": 16, **{name: OPTIONS[name] for name in ("megapixels", "max_graphs", "fit")}}
    crops = set()
    for place in range(len(pictures)):
        entries = (*pictures[:place], often[place], *pictures[place + 1 :])
        prepared = run(Dataset(entries), tiny_vae, tiny_clip, tmp_path)
        weights = [20 if index == place else 1 for index in range(len(pictures))]
        assert prepared.plans[0].plan == plan_buckets(prepared.plans[0].sizes, weights=weights, **options)
        crops.add(prepared.plans[0].plan.mean_crop)
    assert len(crops) > 1


def test_a_part_of_a_folder_names_other_data_and_encodes_nothing_anew(folder, tiny_vae, tiny_clip, counts, tmp_path):
    def prepared(dataset):
        return run(dataset, tiny_vae, tiny_clip, tmp_path)

    pictures = scan_images(folder).entries
    whole = prepared(Dataset(pictures))
    [counter.since_last() for counter in counts]
    half = tuple(replace(entry, options=FolderOptions(sample_ratio=0.5)) for entry in pictures)
    cut_at = [
        tuple(replace(item, folder=int(i >= boundary)) for i, item in enumerate(half)) for boundary in (1, 2, len(half))
    ]
    parts = [prepared(Dataset(entries)) for entries in cut_at]
    assert len({whole.data.fingerprint, *(item.data.fingerprint for item in parts)}) == 4
    apart = Dataset(tuple(replace(entry, folder=i) for i, entry in enumerate(pictures)))
    assert prepared(apart).data.fingerprint == whole.data.fingerprint
    assert [counter.since_last() for counter in counts] == [0, 0] and parts[0].plans[0].plan == whole.plans[0].plan
    assert [(item.sample_ratio, item.folder) for item in parts[0].data.samples] == [(0.5, 0)] + [(0.5, 1)] * 3
    # Of one picture and of three, at least one and half of them; of all four, two.
    epoch_sizes = [summary(item).splitlines()[0].partition("One epoch shows ")[2].partition(",")[0] for item in parts]
    assert epoch_sizes == ["3", "2", "2"]


def test_a_ragged_edge_keeps_the_same_number_of_tokens_of_every_picture(folder, tiny_vae, tiny_clip, tmp_path):
    prepared = run(folder, tiny_vae, tiny_clip, tmp_path, fit="ragged edge", megapixels=0.02)
    assert len({sample.tokens for sample in prepared.data.samples}) == 1
    assert any(sample.tokens < sample.grid[1] * sample.grid[2] for sample in prepared.data.samples)
    for sample in prepared.data.samples:
        assert sample.load().latent.shape == (16, sample.grid[1] * 2, sample.grid[2] * 2)


def test_the_vae_of_another_family_is_refused_before_anything_is_encoded(
    folder, tiny_clip, counts, tiny_files, tmp_path
):
    with pytest.raises(ValueError, match=r"The text encoders are for FLUX.1, but the VAE is for Wan 2.1 and"):
        run(folder, tiny.load_vae(tiny_files["wan_vae"]), tiny_clip, tmp_path)
    assert not counts[1].calls and not (tmp_path / "cache").exists()


def test_an_unreadable_picture_is_named_before_anything_is_encoded(folder, tiny_vae, tiny_clip, counts, tmp_path):
    (folder / "c.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"'c.png' can't be read \(it's damaged or not a picture\); save it again"):
        run(folder, tiny_vae, tiny_clip, tmp_path)
    assert not counts[0].calls


def break_off(path, pixels, **options):
    """A file of these pixels of which the end is missing."""
    Image.fromarray(pixels).save(path, **options)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 3 // 4])


@pytest.mark.parametrize(
    ("ending", "options"),
    [("png", {}), ("jpg", {}), ("jpg", {"progressive": True}), ("bmp", {})],
)
def test_a_picture_that_breaks_off_is_named_before_anything_is_encoded(
    ending, options, folder, tiny_vae, tiny_clip, counts, tmp_path
):
    pixels = np.random.default_rng(1).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    (folder / "e.txt").write_text("broken")
    break_off(folder / f"e.{ending}", pixels, **options)
    with pytest.raises(ValueError, match=rf"'e.{ending}' can't be read \(.*\); save it again as PNG"):
        run(folder, tiny_vae, tiny_clip, tmp_path)
    assert not counts[0].calls and not counts[1].calls
    break_off(folder / "a.png", pixels)
    with pytest.raises(ValueError, match=rf"2 pictures can't be read, .*: a.png, e.{ending}; save them again as PNG"):
        run(folder, tiny_vae, tiny_clip, tmp_path)


def test_pictures_are_checked_to_their_end_if_they_will_be_encoded_and_else_not(
    folder, tiny_vae, tiny_clip, tmp_path, monkeypatch
):
    checked = Counted(monkeypatch, integrity, "is_intact")
    run(folder, tiny_vae, tiny_clip, tmp_path)
    assert checked.since_last() == 4
    Image.new("RGB", SIZES["c"], (200, 30, 30)).save(folder / "c.png")
    run(folder, tiny_vae, tiny_clip, tmp_path)
    assert checked.calls == [(folder / "c.png",)] and checked.since_last()
    run(folder, tiny_vae, tiny_clip, tmp_path)
    assert not checked.calls


def test_values_that_are_not_finite_are_told(folder, tiny_vae, tiny_clip, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_vae, "encode", lambda pixels: torch.full((1, 16, 2, 2), float("nan")))
    with pytest.raises(ValueError, match=r"Encoding a.png gave values that are not finite"):
        run(folder, tiny_vae, tiny_clip, tmp_path)


def test_weights_are_known_by_every_byte_whether_or_not_they_are_patched_in(tiny_files):
    import comfy.model_management
    import tiny

    first, second = (tiny.load_clip(tiny_files["clip_l"], tiny_files["t5"]) for _ in range(2))
    patched = second.clone()
    key = "t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q.weight"
    weight = second.cond_stage_model.state_dict()[key]
    original = weight.clone()
    patched.add_patches({key: ("diff", (torch.ones(weight.shape),))})
    comfy.model_management.load_models_gpu([patched.patcher])
    assert not torch.equal(second.cond_stage_model.state_dict()[key], original)
    assert weights_fingerprint(first.patcher) == weights_fingerprint(second.patcher)
    assert weights_fingerprint(first.patcher) != weights_fingerprint(patched.patcher)
    third = tiny.load_clip(tiny_files["clip_l"], tiny_files["t5"])
    embedding = third.cond_stage_model.t5xxl.transformer.shared.weight
    with torch.no_grad():
        embedding[20001, 3] += embedding[20001, 3].abs() * 0.01 + 1e-3
    assert weights_fingerprint(third.patcher) != weights_fingerprint(first.patcher)

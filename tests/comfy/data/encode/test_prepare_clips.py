"""Preparing clips: what is encoded equals what core's nodes give of the frames, and what does not fit is told first."""

import shutil

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from tessera.data.buckets.grids import crop_box
from tessera.data.folders.dataset import Dataset, scan_images, scan_videos
from tessera.data.media import videos
from tessera.data.media.clip_windows import Extraction
from tessera.data.media.images import load_image
from tessera.data.media.videos import inspect_video, load_frames
from tessera.data.preparation.prepare import summary
from tiny.data.films import write_film
from tiny.data.image_encoders import load_clip_vision, load_wan22_vae
from tiny.data.preparing import prepare

OPTIONS = {"megapixels": 0.003, "max_graphs": 1, "fit": "ragged edge", "max_text_length": 512}


def busy(index, height, width):
    """Stripes that move and a colour that changes."""
    pixels = np.random.default_rng(height).integers(0, 80, (height, width, 3), dtype=np.uint8)
    pixels[:, (4 * index) % width : (4 * index) % width + 12] = 200
    pixels[..., 2] += np.uint8(6 * index)
    return pixels


@pytest.fixture
def films(tmp_path):
    folder = tmp_path / "films"
    folder.mkdir()
    write_film(folder / "a.mp4", 25, size=(64, 96), draw=busy, caption="a striped film")
    write_film(folder / "b.webm", 30, size=(96, 64), draw=busy, caption="a tall film")
    return folder


@pytest.fixture
def stills(tmp_path):
    folder = tmp_path / "stills"
    folder.mkdir()
    Image.fromarray(busy(3, 70, 90)).save(folder / "c.png")
    (folder / "c.txt").write_text("a still picture")
    return folder


@pytest.fixture(scope="module")
def wan_vae(tiny_files):
    return tiny.load_vae(tiny_files["wan_vae"])


@pytest.fixture(scope="module")
def wan22_vae():
    return load_wan22_vae()


@pytest.fixture(scope="module")
def wan_clip(tiny_files):
    return tiny.load_wan_clip(tiny_files["umt5"])


@pytest.fixture(scope="module")
def clip_vision():
    return load_clip_vision(1280)


def run(dataset, vae, clip, tmp_path, **changes):
    with torch.inference_mode():  # as ComfyUI runs nodes
        return prepare(dataset, vae, clip, cache_dir=tmp_path / "cache", **{**OPTIONS, **changes})


def films_of(folder, *frames, **options):
    return scan_videos(folder, Extraction(frames or (9,), **options), repeats=2)


def frames_of(path, grid, start, count, pixels_per_token):
    """The frames that a sample is made of, by the way of the files."""
    facts = inspect_video(path)
    box, target = crop_box(facts.size, grid, pixels_per_token)
    return load_frames(path, facts, facts.frames_at(16, path.name)[start : start + count], box, *target)


def calls_of(monkeypatch, owner, method):
    calls, original = [], getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs))
    return calls


def test_clips_and_pictures_hold_what_core_encodes_of_their_frames(films, stills, wan_vae, wan_clip, tmp_path):
    dataset = films_of(films, 1, 9, method="uniform", frame_sample=2) + scan_images(stills)
    prepared = run(dataset, wan_vae, wan_clip, tmp_path)
    samples = prepared.data.samples
    expected = {
        "a.mp4, frame 1": ("a.mp4", 0, 1), "a.mp4, frame 25": ("a.mp4", 24, 1), "a.mp4, frames 1 to 9": ("a.mp4", 0, 9),
        "a.mp4, frames 17 to 25": ("a.mp4", 16, 9), "b.webm, frame 1": ("b.webm", 0, 1),
        "b.webm, frame 30": ("b.webm", 29, 1), "b.webm, frames 1 to 9": ("b.webm", 0, 9),
        "b.webm, frames 22 to 30": ("b.webm", 21, 9), "c.png": None,
    }  # fmt: skip
    assert [sample.name for sample in samples] == list(expected)
    for sample, placement in zip(samples, prepared.plans[0].plan.placements, strict=True):
        tensors = sample.load()
        frames, height, width = sample.grid
        with torch.inference_mode():
            if (span := expected[sample.name]) is None:
                box, target = crop_box((70, 90), placement.grid, 16)
                pixels = load_image(stills / sample.name, box, *target)
            else:
                pixels = frames_of(films / span[0], placement.grid, span[1], span[2], 16)
            (latent,) = wan_vae.encode(pixels)
            (((cond, _),),) = [wan_clip.encode_from_tokens_scheduled(wan_clip.tokenize(_caption(sample.name)))]
        assert torch.equal(tensors.latent, latent) and latent.shape == (16, frames, height * 2, width * 2)
        assert frames == (1 if span is None else (span[2] - 1) // 4 + 1)
        assert torch.equal(tensors.text, cond) and sample.text_length == 512
        assert tensors.conditioning == {} and sample.conditioning == frozenset()
        assert not tensors.latent.is_inference()
    # One count for all pictures, and that times three for all clips: nothing else is compiled.
    single, three = sorted({sample.tokens for sample in samples})
    assert {(s.tokens // s.grid[0], s.grid[0]) for s in samples} == {(single, 1), (three // 3, 3)}
    assert prepared.data.graph_keys() == [(single, (), 512), (three, (), 512)]
    assert prepared.notes == (
        "Clips of 1, 3 latent frames need 2 token counts, and each is compiled. Clips of one length need only one.",
    )
    text = summary(prepared)
    assert (
        text.startswith("Pictures: 5, Clips: 4. One epoch shows 17, repeats included.") and "3 latent frames of" in text
    )
    shapes = f"tokens of video + text: {single} + 512, {three} + 512"
    assert f"The clips and pictures have 2 shapes ({shapes}); the model is compiled for each." in text


def _caption(name):
    return {"a": "a striped film", "b": "a tall film", "c": "a still picture"}[name[0]]


def test_each_clip_is_encoded_once_and_again_when_its_frames_change(films, wan_vae, wan_clip, tmp_path, monkeypatch):
    encoded = calls_of(monkeypatch, wan_vae, "encode")
    captions = calls_of(monkeypatch, wan_clip, "encode_from_tokens")

    def counts(dataset, **changes):
        encoded.clear(), captions.clear()
        name = run(dataset, wan_vae, wan_clip, tmp_path, **changes).data.fingerprint
        return name, len(encoded), len(captions)

    first, *rest = counts(films_of(films, 9))
    assert rest == [2, 2]
    shutil.copy(films / "a.mp4", films / "copy.mp4")
    (films / "copy.txt").write_text("a striped film")
    assert counts(films_of(films, 9))[1:] == (0, 0)
    (films / "copy.mp4").unlink()
    assert counts(films_of(films, 9)) == (first, 0, 0)
    names = {first}
    for changed in (
        {"frames": (5,)}, {"fps": 8.0}, {"method": "chunk"}, {"method": "full", "max_frames": 5, "fps": 16.1},
    ):  # fmt: skip
        frames = changed.pop("frames", (9,))
        name, pictures, texts = counts(films_of(films, *frames, **changed))
        assert pictures >= 2 and texts == 0 and name not in names, changed
        names.add(name)
    write_film(films / "a.mp4", 25, size=(64, 96), draw=lambda i, h, w: busy(i + 9, h, w))
    assert counts(films_of(films, 9))[1:] == (1, 0)


def test_a_film_is_read_once_however_many_clips_it_gives(films, wan_vae, wan_clip, tmp_path, monkeypatch):
    read = calls_of(monkeypatch, videos, "_digest")
    prepared = run(films_of(films, 5, method="chunk"), wan_vae, wan_clip, tmp_path, image_to_video=True)
    assert len(prepared.data.samples) == 11
    assert sorted(path.name for path, _ in read) == ["a.mp4", "b.webm"]


@pytest.mark.parametrize("curve", [16, 18])
def test_hdr_films_are_named(films, wan_vae, wan_clip, tmp_path, curve):
    def set_up(stream):
        stream.codec_context.color_trc = curve

    write_film(films / "c.mp4", 9, size=(64, 96), draw=busy, caption="a bright film", set_up=set_up)
    notes = run(films_of(films, 1), wan_vae, wan_clip, tmp_path).notes
    assert "HDR video is read as SDR, so it looks pale: c.mp4; save it as SDR (BT.709) for true colours." in notes


def core_image_to_video(vae, frames, vision=None):
    """The conditioning of core's WanImageToVideo with the first frame as the start picture."""
    from comfy_extras.nodes_wan import WanImageToVideo

    length, height, width, _ = frames.shape
    positive, _, _ = WanImageToVideo.execute(
        [[torch.zeros(1, 1, 4), {}]], [], vae, width, height, length, 1, frames[:1], vision
    ).result
    return positive[0][1]


@pytest.mark.parametrize("sees", [False, True])
def test_a_wan_21_start_picture_is_encoded_as_core_wan_image_to_video_does(
    films, wan_vae, wan_clip, clip_vision, tmp_path, sees
):
    import nodes

    vision = clip_vision if sees else None
    prepared = run(films_of(films, 5, 9), wan_vae, wan_clip, tmp_path, image_to_video=True, clip_vision=vision)
    names = {"concat_latent_image", "concat_mask"} | ({"clip_vision_output"} if sees else set())
    for sample, placement in zip(prepared.data.samples, prepared.plans[0].plan.placements, strict=True):
        assert sample.conditioning == names and sample.clean_frames == 0
        path, count = films / sample.name.split(",")[0], int(sample.name.split()[-1])
        with torch.inference_mode():
            frames = frames_of(path, placement.grid, 0, count, 16)
            (vision_output,) = nodes.CLIPVisionEncode().encode(clip_vision, frames[:1], "center")
            expected = core_image_to_video(wan_vae, frames, vision_output if sees else None)
            latent = wan_vae.encode(frames)
        conditioning = sample.load().conditioning
        assert conditioning.keys() == expected.keys() == names
        assert torch.equal(sample.load().latent, latent[0])
        for name in ("concat_latent_image", "concat_mask"):
            assert torch.equal(conditioning[name], expected[name]), name
        if sees:
            output = conditioning["clip_vision_output"]
            assert type(output) is type(vision_output)
            assert torch.equal(output.penultimate_hidden_states, vision_output.penultimate_hidden_states)


def test_start_pictures_are_encoded_once_and_follow_the_vision_model(
    films, wan_vae, wan_clip, clip_vision, tmp_path, monkeypatch
):
    encoded, vision_calls = calls_of(monkeypatch, wan_vae, "encode"), calls_of(monkeypatch, clip_vision, "encode_image")
    plain = run(films_of(films, 9), wan_vae, wan_clip, tmp_path).data.fingerprint
    assert (len(encoded), len(vision_calls)) == (2, 0)
    options = {"image_to_video": True, "clip_vision": clip_vision}
    longer = run(films_of(films, 9), wan_vae, wan_clip, tmp_path, **options)
    led_name = longer.data.fingerprint
    assert (len(encoded), len(vision_calls)) == (4, 2)
    run(films_of(films, 9), wan_vae, wan_clip, tmp_path, **options)
    assert (len(encoded), len(vision_calls)) == (4, 2)
    # Shorter clips have less grey after the same start, which has been seen unless their plan cuts it otherwise.
    shorter = run(films_of(films, 5), wan_vae, wan_clip, tmp_path, **options)
    recut = sum(
        (longer_place.grid.height, longer_place.grid.width) != (other.grid.height, other.grid.width)
        for longer_place, other in zip(longer.plans[0].plan.placements, shorter.plans[0].plan.placements, strict=True)
    )
    assert (len(encoded), len(vision_calls)) == (8, 2 + recut)
    other = load_clip_vision(1280)
    with torch.no_grad():
        other.model.vision_model.embeddings.class_embedding += 1
    assert run(films_of(films, 9), wan_vae, wan_clip, tmp_path, image_to_video=True, clip_vision=other)
    assert len(encoded) == 8
    names = {
        plain,
        led_name,
        run(films_of(films, 9), wan_vae, wan_clip, tmp_path, image_to_video=True).data.fingerprint,
    }
    assert len(names) == 3


def test_wan_22_5b_takes_its_start_picture_as_a_clean_first_frame(
    films, stills, wan22_vae, wan_clip, clip_vision, tmp_path
):
    dataset = films_of(films, 9) + scan_images(stills)
    plain, with_start = (
        run(dataset, wan22_vae, wan_clip, tmp_path, megapixels=0.012, image_to_video=image_to_video)
        for image_to_video in (False, True)
    )
    assert [sample.clean_frames for sample in plain.data.samples] == [0, 0, 0]
    assert [sample.clean_frames for sample in with_start.data.samples] == [1, 1, 0]
    assert plain.data.fingerprint != with_start.data.fingerprint
    assert with_start.notes[-1] == "These are single frames, so they train without a start picture: c.png."
    for sample, placement in zip(with_start.data.samples, with_start.plans[0].plan.placements, strict=True):
        frames, height, width = sample.grid
        tensors = sample.load()
        assert tensors.latent.shape == (48, frames, height * 2, width * 2) and tensors.conditioning == {}
        if frames > 1:
            with torch.inference_mode():
                pixels = frames_of(films / sample.name.split(",")[0], placement.grid, 0, 9, 32)
                assert torch.equal(tensors.latent, wan22_vae.encode(pixels)[0])
    with_vision = run(
        dataset, wan22_vae, wan_clip, tmp_path, megapixels=0.012, image_to_video=True, clip_vision=clip_vision
    )
    assert with_vision.data.fingerprint == with_start.data.fingerprint


def test_a_clip_that_the_vae_could_only_encode_in_tiles_is_refused(films, wan_vae, wan_clip, tmp_path, monkeypatch):
    def encode(pixels):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    tiles = calls_of(monkeypatch, wan_vae, "encode_tiled_3d")
    monkeypatch.setattr(wan_vae.first_stage_model, "encode", encode)
    with pytest.raises(
        torch.cuda.OutOfMemoryError,
        match=r"out of memory encoding 'a.mp4, frames 1 to 9' at \d+ x \d+ pixels and 9 frames; lower megapixels or "
        r"target_frames",
    ):
        run(films_of(films, 9), wan_vae, wan_clip, tmp_path)
    assert not tiles and not list((tmp_path / "cache").rglob("*.safetensors"))


def test_films_that_are_too_short_for_one_length_are_noted_and_for_all_are_refused(
    films, wan_vae, wan_clip, tmp_path, monkeypatch
):
    encoded = calls_of(monkeypatch, wan_vae, "encode")
    prepared = run(films_of(films, 5, 29), wan_vae, wan_clip, tmp_path, megapixels=0.001)
    assert [s.name for s in prepared.data.samples] == [
        "a.mp4, frames 1 to 5", "b.webm, frames 1 to 5", "b.webm, frames 1 to 29",
    ]  # fmt: skip
    assert "Too short for a clip of 29 frames: a.mp4 (25 frames)." in prepared.notes
    encoded.clear()
    with pytest.raises(
        ValueError,
        match=r"Shorter than the 33 frames asked for at 16 frames per second: a.mp4 \(25 frames\), b.webm \(30 "
        r"frames\); put 25 into target_frames \(such as 1, 25\), or take",
    ):
        run(films_of(films, 33, 49), wan_vae, wan_clip, tmp_path)
    with pytest.raises(ValueError, match=r"Shorter than the 29 frames asked for: a.mp4 \(25 frames\); put 25 into"):
        run(films_of(films, 29, fps=0), wan_vae, wan_clip, tmp_path)
    two_rates = films_of(films, 33) + films_of(films, 49, fps=8)
    with pytest.raises(
        ValueError,
        match=r"Shorter than the 33 frames asked for at 16 frames per second: a.mp4 \(25 frames\), b.webm \(30 "
        r"frames\); put 25 into .* folder. Shorter than the 49 frames asked for at 8 frames per second: a.mp4 \(12 "
        r"frames\), b.webm \(15 frames\); put 9 into",
    ):
        run(two_rates, wan_vae, wan_clip, tmp_path)
    slow = run(films_of(films, 5, fps=24), wan_vae, wan_clip, tmp_path)
    assert any(note.startswith("These have fewer frames per second") for note in slow.notes)
    all_frames = run(films_of(films, 1, method="chunk"), wan_vae, wan_clip, tmp_path, megapixels=0.001)
    assert "chunk with 1 in target_frames takes every frame of every clip as a picture." in all_frames.notes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vae": "flux"}, r"The text encoders are for Wan, but the VAE is for FLUX.1; load the VAE of Wan 2.1"),
        (
            {"clip": "flux", "vae": "flux"},
            r"FLUX.1 makes pictures, and the data set holds clips \(a.mp4, frames 1 to 9",
        ),
        ({"clip": "qwen"}, r"Qwen-Image makes pictures, and the data set holds clips"),
        ({"clip": "qwen", "image_to_video": True}, r"image_to_video is on, and Qwen-Image makes no video; switch it"),
        ({"clip_vision": object()}, r"clip_vision is connected and image_to_video is off; switch it on"),
        (
            {"image_to_video": True, "frames": (1, 9)},
            r"no frame after it to learn: a.mp4, frame 1, b.webm, frame 1; take pictures out of the data set and 1 out",
        ),
        ({"edit_prompt": "x"}, r"edit_prompt is 'x'; choose one of plus \(2509, 2511\), first edit"),
        (
            {"image_to_video": True, "clip_vision": load_clip_vision},
            r"clip_vision is a CLIP vision model of width 32 and Wan 2.1 takes one of 1280; load clip_vision_h.safet",
        ),
        ({"empty": True}, r"The data set is empty; connect Training Images or Training Clips"),
    ],
)
def test_options_that_do_not_go_together_are_told_before_anything_is_encoded(
    films, wan_vae, wan_clip, tiny_vae, tiny_clip, tiny_files, tmp_path, monkeypatch, change, message
):
    change = dict(change)
    encoded = [calls_of(monkeypatch, vae, "encode") for vae in (wan_vae, tiny_vae)]
    vae = tiny_vae if change.pop("vae", None) else wan_vae
    clip_name = change.pop("clip", None)
    clip = (
        wan_clip if clip_name is None else tiny_clip if clip_name == "flux" else tiny.load_qwen_clip(tiny_files["qwen"])
    )
    dataset = Dataset(()) if change.pop("empty", False) else films_of(films, *change.pop("frames", (9,)))
    if change.get("clip_vision") is load_clip_vision:
        change["clip_vision"] = load_clip_vision(32)
    with pytest.raises(ValueError, match=message):
        run(dataset, vae, clip, tmp_path, **change)
    assert encoded == [[], []] and not (tmp_path / "cache").exists()


def test_a_film_with_single_frames_trains_a_picture_model(films, tiny_vae, tiny_clip, tmp_path):
    prepared = run(films_of(films, 1), tiny_vae, tiny_clip, tmp_path)
    assert [s.load().latent.ndim for s in prepared.data.samples] == [3, 3]


def test_max_text_length_cuts_captions_of_wan(films, wan_vae, wan_clip, tmp_path):
    prepared = run(films_of(films, 9), wan_vae, wan_clip, tmp_path, max_text_length=256)
    assert {s.text_length for s in prepared.data.samples} == {512}
    (films / "a.txt").write_text("long " * 200)
    cut = run(films_of(films, 9), wan_vae, wan_clip, tmp_path).notes
    assert any(
        note.startswith("These captions are longer than 512 tokens, so their end is cut off: a.mp4") for note in cut
    )

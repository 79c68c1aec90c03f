"""Latents of clips, start pictures and control pictures as core's nodes give them."""

import pytest
import tiny
import torch
from tessera.data.preparation.from_latents import latents_to_data
from tiny.data.image_encoders import load_clip_vision, load_seeing_qwen_clip, load_wan22_vae


def noise(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def entry(**extra):
    return [torch.zeros(1, 512, 8), {"pooled_output": None, **extra}]


@pytest.fixture(scope="module")
def wan_vae(tiny_files):
    return tiny.load_vae(tiny_files["wan_vae"])


def loaded(data):
    return [sample.load() for sample in data.samples]


def grad_ready(value):
    weight = torch.ones((), requires_grad=True)
    (value.float() * weight).sum().backward()
    return not value.is_inference()


def test_a_clip_with_its_start_picture_is_cut_together(wan_vae):
    import nodes
    from comfy_extras.nodes_wan import WanImageToVideo

    vision = load_clip_vision()
    with torch.inference_mode():
        large, small = noise(5, 48, 96, 3), noise(5, 48, 64, 3, seed=1)
        latents, positive = [], []
        for frames in (large, small):
            _, height, width, _ = frames.shape
            (vision_output,) = nodes.CLIPVisionEncode().encode(vision, frames[:1], "center")
            conditioned, _, _ = WanImageToVideo.execute(
                [entry()], [], wan_vae, width, height, 5, 1, frames[:1], vision_output
            ).result
            latents.append({"samples": wan_vae.encode(frames)})
            positive.append(conditioned)
        data = latents_to_data(latents, positive, 1)
    assert [s.grid for s in data.samples] == [(2, 3, 4), (2, 3, 4)] and {s.tokens for s in data.samples} == {24}
    for sample, tensors, latent, conditioned in zip(data.samples, loaded(data), latents, positive, strict=True):
        left = (latent["samples"].shape[-1] - 8) // 4 * 2
        cut = (..., slice(left, left + 8))
        assert torch.equal(tensors.latent, latent["samples"][0][cut])
        for name in ("concat_latent_image", "concat_mask"):
            assert torch.equal(tensors.conditioning[name], conditioned[0][1][name][cut]), name
            assert grad_ready(tensors.conditioning[name])
        vision_output = tensors.conditioning["clip_vision_output"].penultimate_hidden_states
        assert torch.equal(
            vision_output, conditioned[0][1]["clip_vision_output"].penultimate_hidden_states
        ) and grad_ready(vision_output)
        assert sample.conditioning == {"concat_latent_image", "concat_mask", "clip_vision_output"}
    assert len(data.notes) == 1 and data.notes[0].startswith("Cropped to keep within max_graphs (24 tokens")


def test_clip_vision_output_is_part_of_the_fingerprint():
    from tessera.data.encode.clip_vision import vision_output

    names = {
        latents_to_data([{"samples": noise(1, 16, 2, 4, 4)}], [[entry(clip_vision_output=vision)]], 1).fingerprint
        for vision in (None, vision_output(torch.zeros(1, 3, 4)), vision_output(torch.ones(1, 3, 4)))
    }
    assert len(names) == 3


def test_reference_latents_of_core_are_the_references_of_a_sample(wan_vae, tiny_files):
    from comfy_extras.nodes_edit_model import ReferenceLatent

    clip = load_seeing_qwen_clip(tiny_files["qwen"])
    with torch.inference_mode():
        (positive,) = [[[clip.encode_from_tokens(clip.tokenize("a fox")), {"pooled_output": None}]]]
        for picture in (noise(1, 64, 96, 3), noise(1, 72, 40, 3, seed=1)):  # the second has 9 x 5 cells
            (positive,) = ReferenceLatent.execute(positive, {"samples": wan_vae.encode(picture)}).result
        data = latents_to_data([{"samples": wan_vae.encode(noise(1, 48, 48, 3))}], [positive], 1)
    (sample,), (tensors,) = data.samples, loaded(data)
    assert sample.references == (24, 8) and sample.tokens == 9
    assert data.graph_keys() == [(9, (24, 8), sample.text_length)]
    references = positive[0][1]["reference_latents"]
    first, second = tensors.conditioning["reference_latents"]
    assert torch.equal(first, references[0]) and torch.equal(second, references[1][..., :8, :4])
    assert first.shape == (1, 16, 1, 8, 12) and grad_ready(first) and grad_ready(second)
    assert data.notes == ("Reference latents of an odd number of cells are cut to whole tokens: latent 1.",)
    assert references[1].shape[-2:] == (9, 5)  # the user's conditioning is as it was


@pytest.mark.parametrize("frames", [(), (1,)])
def test_a_reference_of_its_latents_sides_is_cropped_with_it_and_others_are_named(frames):
    small, large = ({"samples": noise(1, 16, *frames, *sides)} for sides in ((8, 12), (16, 20)))
    alike, other = noise(1, 16, *frames, 16, 20, seed=5), noise(1, 16, *frames, 8, 8, seed=6)
    texts = [[entry()], [entry(reference_latents=[alike, alike.roll(1)])], [entry(reference_latents=[other])]]
    data = latents_to_data([small, large, large], texts, 1)
    _, cropped, apart = data.samples
    _, height, width = cropped.grid
    assert cropped.references == (height * width,) * 2 and apart.references == (16,)
    top, left = (8 - height) // 2 * 2, (10 - width) // 2 * 2
    tensors = cropped.load()
    first, second = tensors.conditioning["reference_latents"]
    rows, columns = slice(top, top + 2 * height), slice(left, left + 2 * width)
    assert torch.equal(first, alike[..., rows, columns])
    assert torch.equal(second, alike.roll(1)[..., rows, columns])
    assert first.shape[-2:] == tensors.latent.shape[-2:] != (16, 20)
    assert torch.equal(apart.load().conditioning["reference_latents"][0], other)
    assert any(
        note.startswith("Cropped without their reference latents, which have a different size: latent 3; raise")
        for note in data.notes
    )


def test_references_of_more_shapes_than_graphs_are_named():
    latents = [{"samples": noise(1, 16, 8, 8)}] * 3
    sides = ((8, 8), (8, 12), (8, 12))
    texts = [[entry(reference_latents=[noise(1, 16, *side)])] for side in sides]
    (note,) = latents_to_data(latents, texts, 1).notes
    assert note == (
        "With their reference latents (16, 24 tokens) the latents make 2 graphs, each compiled; encode the control "
        "pictures at fewer sizes, or use Prepare Dataset, which plans them."
    )
    assert latents_to_data(latents, texts, 2).notes == ()
    assert latents_to_data(latents[1:], texts[1:], 1).notes == ()


@pytest.mark.parametrize(
    ("channels", "tokens"),
    [(16, 24), (48, 24), (128, 96)],
)
def test_the_size_of_a_token_is_known_by_the_channels(channels, tokens):
    (sample,) = latents_to_data([{"samples": noise(1, channels, 8, 12)}], [[entry()]], 1).samples
    assert sample.tokens == tokens


def test_core_wan22_image_to_video_latent_gives_a_clean_first_frame():
    from comfy_extras.nodes_wan import Wan22ImageToVideoLatent

    vae = load_wan22_vae()
    with torch.inference_mode():
        (start_latent,) = Wan22ImageToVideoLatent.execute(vae, 64, 96, 9, 2, noise(1, 96, 64, 3)).result
        plain = {"samples": start_latent["samples"]}
        data = latents_to_data([start_latent, plain], [[entry()]], 1)
    assert [sample.clean_frames for sample in data.samples] == [1, 1, 0, 0]
    assert data.samples[0].grid == (3, 3, 2) and data.notes == ()
    assert data.fingerprint != latents_to_data([plain, plain], [[entry()]], 1).fingerprint


def test_other_noise_masks_are_left_out_and_named():
    mask = torch.ones(1, 1, 3, 6, 4)
    mask[:, :, :1] = 0
    wan21 = {"samples": noise(1, 16, 3, 6, 4), "noise_mask": mask}
    assert latents_to_data([wan21], [[entry()]], 1).samples[0].clean_frames == 0
    cases = {"part of a frame": (0, 0, 0.0), "half": (0, slice(None), 0.5), "a later frame": (2, slice(None), 0.0)}
    for name, (frame, rows, value) in cases.items():
        other = torch.ones(1, 1, 3, 6, 4)
        other[:, :, frame, rows] = value
        data = latents_to_data([{"samples": noise(1, 48, 3, 6, 4), "noise_mask": other}], [[entry()]], 1)
        assert data.samples[0].clean_frames == 0, name
        (note,) = data.notes
        assert note.startswith("Training takes the whole picture, so the noise mask is ignored for latent 1;"), name
    two = torch.ones(1, 1, 3, 6, 4)
    two[:, :, :2] = 0
    data = latents_to_data([{"samples": noise(1, 48, 3, 6, 4), "noise_mask": two}], [[entry()]], 1)
    assert data.samples[0].clean_frames == 2 and data.notes == ()


def test_clips_and_pictures_keep_counts_of_their_own():
    latents = [{"samples": noise(1, 16, *shape)} for shape in ((1, 8, 12), (3, 8, 12), (3, 8, 14))]
    data = latents_to_data(latents, [[entry()]], 1)
    assert [sample.tokens for sample in data.samples] == [24, 72, 72]
    assert "There are 2 token counts (24, 72), the fewest for pictures and clips of these lengths" in data.notes[-1]


def test_only_captions_of_flux_1_are_compiled_by_their_length():
    texts = [[torch.zeros(1, length, 8), {"pooled_output": None}] for length in (20, 30)]
    assert latents_to_data([{"samples": noise(16, 8, 8)}] * 2, [[text] for text in texts], 1).notes == ()


@pytest.mark.parametrize(
    ("channels", "extra", "message"),
    [
        (
            16,
            {"concat_latent_image": torch.zeros(1, 16, 3, 8, 8), "concat_mask": torch.zeros(1, 1, 3, 8, 8)},
            r"Latent 1 is 12 x 8 cells and 3 frames and the start picture of its conditioning \(concat_latent_image\) "
            r"is 8 x 8 cells and 3 frames; give WanImageToVideo the width, height and length of the clip",
        ),
        (16, {"concat_mask": torch.zeros(1, 1, 2, 8, 12)}, r"\(concat_mask\) is 12 x 8 cells and 2 frames"),
        (
            16,
            {"reference_latents": [torch.zeros(2, 16, 8, 8)]},
            r"A reference latent of latent 1 has the shape \(2, 16, 8, 8\); it must be one picture of 16 channels",
        ),
        (
            16,
            {"reference_latents": [torch.zeros(1, 16, 3, 8, 12)]},
            r"A reference latent of latent 1 has the shape \(1, 16, 3, 8, 12\); it must be one picture of 16 channels",
        ),
        (16, {"reference_latents": [torch.zeros(1, 48, 8, 8)]}, r"A reference latent of latent 1 has the shape"),
        (16, {"reference_latents": [torch.zeros(1, 16, 1, 8)]}, r"A reference latent of latent 1 has the shape"),
    ],
)
def test_latents_that_do_not_fit_are_told_in_a_sentence(channels, extra, message):
    with pytest.raises(ValueError, match=message):
        latents_to_data([{"samples": noise(1, channels, 3, 8, 12)}], [[entry(**extra)]], 1)

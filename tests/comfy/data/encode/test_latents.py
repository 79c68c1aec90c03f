"""Latents and conditionings in the forms that core's nodes give them."""

from dataclasses import replace

import pytest
import torch
from tessera.data.preparation.checks import length_notes
from tessera.data.preparation.from_latents import latents_to_data


def latent(*shape, seed=0):
    return {"samples": torch.randn(shape, generator=torch.Generator().manual_seed(seed))}


def entry(value, length=256):
    """One entry of ComfyUI's conditioning, filled with a number that tells whose it is."""
    return [torch.full((1, length, 8), float(value)), {"pooled_output": torch.full((1, 4), float(value))}]


def values(data):
    return [sample.load().text[0, 0, 0].item() for sample in data.samples]


def test_core_make_training_dataset_gives_one_conditioning_per_latent(tiny_vae, tiny_clip):
    from comfy_extras.nodes_dataset import MakeTrainingDataset

    with torch.inference_mode():
        pictures = [torch.rand(1, 64, 96, 3), torch.rand(1, 96, 64, 3)]
        latents, positive = MakeTrainingDataset.execute(pictures, [tiny_vae], [tiny_clip], ["a fox", "a house"]).result
        data = latents_to_data(latents, positive, 1)
        loaded = [sample.load() for sample in data.samples]
    assert [(s.grid, s.tokens, s.text_length) for s in data.samples] == [((1, 4, 6), 24, 256), ((1, 6, 4), 24, 256)]
    assert data.notes == ()
    for tensors, source, ((cond, extra),) in zip(loaded, latents, positive, strict=True):
        assert torch.equal(tensors.latent, source["samples"][0]) and torch.equal(tensors.text, cond)
        assert torch.equal(tensors.conditioning["pooled_output"], extra["pooled_output"])
        for tensor in (tensors.latent, tensors.text, tensors.conditioning["pooled_output"]):
            assert not tensor.is_inference()


def test_core_resolution_bucket_gives_a_batch_and_a_list_per_bucket():
    from comfy_extras.nodes_dataset import ResolutionBucket

    latents = [latent(1, 16, 8, 12, seed=1), latent(1, 16, 12, 8, seed=2), latent(1, 16, 8, 12, seed=3)]
    buckets, positive = ResolutionBucket.execute(latents, [[entry(1)], [entry(2)], [entry(3)]]).result
    data = latents_to_data(buckets, positive, 1)
    assert values(data) == [1, 3, 2]
    for sample, index in zip(data.samples, (0, 2, 1), strict=True):
        assert torch.equal(sample.load().latent, latents[index]["samples"][0])


@pytest.mark.parametrize(
    ("shapes", "positive", "expected"),
    [
        ([(16, 8, 8)], [[entry(1)]], [1]),
        ([(1, 16, 8, 8)], [[entry(1)]], [1]),
        ([(3, 16, 8, 8)], [[entry(1), entry(2), entry(3)]], [1, 2, 3]),
        ([(3, 16, 8, 8)], [[entry(1)]], [1, 1, 1]),
        ([(3, 16, 8, 8)], [[entry(1)], [entry(2)], [entry(3)]], [1, 2, 3]),
        ([(2, 16, 8, 8), (1, 16, 8, 8)], [[entry(1)], [entry(2)]], [1, 1, 2]),
        ([(2, 16, 8, 8), (16, 8, 8)], [[entry(1), entry(2)], [entry(3)]], [1, 2, 3]),
        ([(16, 8, 8)] * 3, [[entry(7)]], [7, 7, 7]),
        ([(16, 8, 8)] * 3, [[entry(1), entry(2), entry(3)]], [1, 2, 3]),
        ([(2, 16, 1, 8, 8)], [[entry(1), entry(2)]], [1, 2]),
    ],
)
def test_each_picture_takes_its_own_conditioning(shapes, positive, expected):
    data = latents_to_data([latent(*shape) for shape in shapes], positive, 1)
    assert values(data) == expected
    assert {sample.load().latent.shape for sample in data.samples} == {(16, 8, 8)}


@pytest.mark.parametrize("axis", [1, 2])
def test_a_text_embedding_with_one_axis_too_many_is_taken_without_it(axis):
    text, extra = entry(1)
    data = latents_to_data([latent(1, 16, 8, 8)], [[[text.unsqueeze(axis), extra]]], 1)
    assert torch.equal(data.samples[0].load().text, text)
    with pytest.raises(ValueError, match=r"The conditioning of latent 1 has the shape \(1, 2, 2, 64\); it must be"):
        latents_to_data([latent(1, 16, 8, 8)], [[[torch.zeros(1, 2, 2, 64), extra]]], 1)


def test_a_clip_keeps_its_frames():
    (sample,) = latents_to_data([latent(1, 16, 3, 8, 12)], [[entry(1)]], 1).samples
    assert sample.grid == (3, 4, 6) and sample.tokens == 72
    assert sample.load().latent.shape == (16, 3, 8, 12)


def test_an_odd_side_is_cut_to_whole_tokens_and_named():
    source = latent(1, 16, 9, 13)
    data = latents_to_data([source, latent(1, 16, 8, 12)], [[entry(1)], [entry(2)]], 1)
    assert data.samples[0].grid == (1, 4, 6)
    assert torch.equal(data.samples[0].load().latent, source["samples"][0, :, :8, :12])
    assert data.notes == ("These have an odd number of latent cells along a side, so one row is cut off: latent 1.",)


def test_more_token_counts_than_graphs_are_cut_in_the_middle_and_said():
    source = [latent(1, 16, 8, 12, seed=1), latent(1, 16, 16, 20, seed=2)]
    positive = [[entry(1)], [entry(2)]]
    free = latents_to_data(source, positive, 2)
    assert [s.tokens for s in free.samples] == [24, 80] and free.notes == ()

    data = latents_to_data(source, positive, 1)
    small, large = data.samples
    assert small.tokens == large.tokens == 24
    _, height, width = large.grid
    top, left = (8 - height) // 2 * 2, (10 - width) // 2 * 2
    middle = source[1]["samples"][0, :, top : top + height * 2, left : left + width * 2]
    assert torch.equal(large.load().latent, middle)
    assert data.notes == (
        f"Cropped to keep within max_graphs (24 tokens, ragged edge): latent 2 (from 10 x 8 to {width} x {height} "
        f"tokens, 70.0%).",
    )


def test_captions_of_several_lengths_are_left_to_the_model():
    data = latents_to_data([latent(16, 8, 8)] * 2, [[entry(1)], [entry(2, 301)]], 1)
    assert data.graph_keys() == [(16, (), 256), (16, (), 301)]
    assert data.notes == ()


def test_every_length_that_a_sample_s_captions_may_have_is_planned_and_told():
    (sample, *_), key = latents_to_data([latent(16, 8, 8)], [[entry(1)]], 1).samples, (16, ())
    varied = replace(sample, text_length=20, text_lengths=tuple(range(12, 21)))
    data = replace(latents_to_data([latent(16, 8, 8)], [[entry(1)]], 1), samples=(sample, varied))
    assert data.graph_keys() == [(*key, length) for length in (*range(12, 21), 256)]
    assert list(length_notes([sample])) == []
    assert list(length_notes([replace(sample, text_lengths=(7, 9))])) == [
        "The captions have 2 different lengths (7, 9 tokens), and each is compiled separately."
    ]
    assert list(length_notes(data.samples)) == [
        "The captions have 10 different lengths (12 to 256 tokens), and each is compiled separately. Together with "
        "the picture sizes that makes 10 graphs per block type: write captions of similar length, or switch compile "
        "off on Train LoRA."
    ]


def test_a_noise_mask_is_named_as_left_out():
    masked = latent(2, 16, 8, 8) | {"noise_mask": torch.ones(1, 64, 64)}
    data = latents_to_data([latent(16, 8, 8), masked, latent(16, 8, 8) | {"noise_mask": None}], [[entry(1)]], 1)
    (note,) = data.notes
    assert note.startswith("Training takes the whole picture, so the noise mask is ignored for latent 2, latent 3;")
    assert all(sample.load().weights is None for sample in data.samples)


def test_a_noise_mask_is_how_much_each_token_counts_with_masked_loss():
    mask = torch.rand(1, 96, 64, generator=torch.Generator().manual_seed(4))
    pictures = [latent(16, 8, 12) | {"noise_mask": mask}, latent(16, 12, 6), latent(16, 7, 12)]
    data = latents_to_data(pictures, [[entry(1)]], 1, masked_loss=True)
    wide, tall, odd = data.samples
    assert tall.load().weights is None is odd.load().weights
    assert data.notes[0].startswith("These have an odd number of latent cells")
    # 24 tokens of 24 x 10.67 pixels are cut to the 18 of the others, in the middle.
    _, height, width = wide.grid
    fine = mask[0].repeat_interleave(3, dim=1)
    means = fine.reshape(4, 24, 6, 32).mean(dim=(1, 3))
    top, left = (4 - height) // 2, (6 - width) // 2
    expected = means[top : top + height, left : left + width].flatten()[: wide.tokens]
    torch.testing.assert_close(wide.load().weights, expected)
    other = latents_to_data([pictures[0] | {"noise_mask": 1 - mask}, *pictures[1:]], [[entry(1)]], 1, masked_loss=True)
    assert other.fingerprint != data.fingerprint
    with pytest.raises(ValueError, match="noise mask of latent 1 is 0 everywhere in the cropped latent"):
        latents_to_data([pictures[0] | {"noise_mask": 0 * mask}], [[entry(1)]], 1, masked_loss=True)
    (note,) = latents_to_data([latent(16, 8, 8)], [[entry(1)]], 1, masked_loss=True).notes
    assert note.startswith("masked_loss has no effect")


def test_the_fingerprint_follows_every_tensor_and_the_order():
    def name(first, second, positive):
        return latents_to_data([first, second], positive, 1).fingerprint

    a, b = latent(16, 8, 8, seed=1), latent(16, 8, 8, seed=2)
    text, two = [entry(1)], [entry(2)]
    pooled = [[text[0][0], {"pooled_output": torch.zeros(1, 4)}]]
    names = {name(a, b, [text, two]), name(b, a, [text, two]), name(a, b, [two, text]), name(a, b, [pooled, two])}
    assert len(names) == 4
    assert name(a, b, [text, two]) in names


@pytest.mark.parametrize(
    ("latents", "positive", "message"),
    [
        ([], [], r"latents is empty; connect the latents"),
        (
            [latent(3, 16, 8, 8)],
            [[entry(1), entry(2)]],
            r"positive has 2 conditionings and latents has 3 pictures; give",
        ),
        ([latent(16, 8)], [[entry(1)]], r"Latent 1 has the shape \(16, 8\); it must be \(C, H, W\)"),
        ([latent(1, 16, 1, 8)], [[entry(1)]], r"Picture 1 of latents is 1 x 8 cells, too small"),
        ([latent(16, 8, 8)], [[[torch.zeros(256, 8), {}]]], r"conditioning of latent 1 has the shape \(256, 8\)"),
        (
            [latent(16, 8, 8), latent(1, 4, 8, 8)],
            [[entry(1)]],
            r"different numbers of channels \(latent 1 has 16, latent 2 has 4\); encode all pictures with one VAE",
        ),
        (
            [latent(16, 8, 8), {"samples": latent(16, 8, 8)["samples"] / 0}],
            [[entry(1)]],
            r"Latent 2 holds values that are not finite; encode it again",
        ),
        ([latent(16, 8, 8)], [[entry(float("nan"))]], r"conditioning of latent 1 holds values that are not finite"),
        ([latent(16, 8, 8)], [[entry(1)]], r"max_graphs is 0; set it to 1 or more"),
    ],
)
def test_latents_that_do_not_fit_are_told_in_a_sentence(latents, positive, message):
    with pytest.raises(ValueError, match=message):
        latents_to_data(latents, positive, 0 if "max_graphs" in message else 1)

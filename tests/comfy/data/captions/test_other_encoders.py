"""Data for models without a family of ours: what core's nodes give for any text encoder and any VAE."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from safetensors.torch import save_file
from tessera.data.buckets.grids import crop_box
from tessera.data.encode.text import encode_caption, tokenize_captions
from tessera.data.encode.vae import BYTES
from tessera.data.folders.dataset import scan_images, scan_videos
from tessera.data.folders.items import Item
from tessera.data.media.clip_windows import Extraction
from tessera.data.media.frames import VideoPixels
from tessera.data.media.images import load_image
from tessera.data.preparation.checks import cut_to_latent_frames
from tessera.data.preparation.from_latents import latents_to_data
from tessera.models.catalogue.registry import text_policy
from tessera.models.latents import FLUX, WAN21, latent_policy
from tessera.models.native.facts.videos import MINIMAX_LATENTS
from tessera.models.native.text import CoreText
from tessera.models.text import check_pair
from tiny.data import other_encoders
from tiny.data.films import write_film
from tiny.data.preparing import prepare
from tiny.native import ROWS, build
from tiny.train.runs import Watcher, train

OPTIONS = {"megapixels": 0.05, "max_graphs": 2, "fit": "ragged edge", "max_text_length": 512}
PLAIN = ["", "a red fox in the snow", "Caf\u00e9, 1920s; \u201cquoted\u201d 100%\ntwo lines", "tree " * 150]
LITERAL = "(red:1.4) \\(fox\\) ((a)) embedding:known"
NAMES = {
    "sdxl": "SDXL (clip_g, clip_l)",
    "z_image": "ZImage (qwen3_4b)",
    "ltx": "LTXVT5 (t5xxl)",
    "anima": "Anima (qwen3_06b, t5xxl)",
    "hidream": "HiDream (clip_g, clip_l, llama, t5xxl)",
    "hunyuan_video_15": "HunyuanVideo15 (byt5_small, qwen25_7b)",
}


@pytest.fixture(scope="module")
def clips():
    return {name: getattr(other_encoders, f"load_{name}_clip")() for name in NAMES}


def captioned(text):
    return Item("a.png", text, 1, None)


def core_node(clip, text):
    """Encode as core's CLIP Text Encode does."""
    import nodes

    with torch.inference_mode():
        (((cond, extra),),) = nodes.CLIPTextEncode().encode(clip, text)
    return {"cond": cond} | {name: value for name, value in extra.items() if value is not None}


def calls_of(monkeypatch, owner, method):
    calls, original = [], getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs))
    return calls


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_caption_is_encoded_bit_for_bit_as_core_encodes_it_with_all_that_belongs_to_it(clips, name):
    clip, policy = clips[name], text_policy(clips[name])
    assert policy.family == NAMES[name]
    for text in PLAIN:
        caption = policy.tokenize(clip, text)
        assert caption.tokens == clip.tokenize(text) and caption.length is None
        encoded, expected = encode_caption(clip, caption, policy), core_node(clip, text)
        assert encoded.keys() == expected.keys()
        assert all(torch.equal(encoded[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["sdxl", "z_image", "ltx", "krea2"])
def test_the_space_for_a_caption_is_counted_with_every_layer_that_the_encoders_hand_on(clips, name):
    clip = clips.get(name) or getattr(other_encoders, f"load_{name}_clip")()
    policy = text_policy(clip)
    caption = policy.tokenize(clip, "tree " * 150)
    count = sum(tensor.numel() for tensor in encode_caption(clip, caption, policy).values())
    (captions,) = tokenize_captions(
        [captioned("tree " * 150)], [()], clip, policy, None, "", lambda *_: None, lambda: None
    )
    # Krea 2 leaves a template of its own out of what it gives.
    assert 0.95 * count < captions.variants[0].job.bytes / BYTES < 1.3 * count


def test_the_space_for_hidream_and_ltx_2_counts_all_layers_where_they_are_stored(clips):
    assert text_policy(clips["hidream"]).width(clips["hidream"]) == 32 + 4 * 32  # CLIP-L, and Llama's four layers
    projected = SimpleNamespace(text_embedding_projection=torch.nn.Linear(49 * 4, 6))
    assert CoreText.width(text_policy(clips["ltx"]), SimpleNamespace(cond_stage_model=projected)) == 6


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hunyuan_video_15"])  # ByT5 reads quotes alone
def test_brackets_backslashes_and_embeddings_are_text_for_every_tokenizer(clips, name, tmp_path):
    clip, policy = clips[name], text_policy(clips[name])
    parts = {key: part for key, part in vars(clip.tokenizer).items() if hasattr(part, "embedding_identifier")}
    save_file({"emb_params": torch.ones(2, 32)}, tmp_path / "known.safetensors")
    for part in parts.values():
        part.embedding_directory = str(tmp_path)
    caption = policy.tokenize(clip, LITERAL)
    pairs = {key: [pair for chunk in chunks for pair in chunk] for key, chunks in caption.tokens.items()}
    assert all(
        weight == 1.0 and isinstance(token, int) for chunk_pairs in pairs.values() for token, weight in chunk_pairs
    )
    template = getattr(clip.tokenizer, "llama_template", "{}")
    for key, part in parts.items():
        ids = part.tokenizer(template.format(LITERAL), add_special_tokens=False)["input_ids"]
        tokens = [token for token, _ in pairs[key.removeprefix("clip_")]]
        assert "".join(map(str, ids)) in "".join(map(str, tokens)), key
        assert part.embedding_identifier == "embedding:" and not part.disable_weights  # the user's CLIP is as it was


def test_a_long_caption_of_two_encoders_with_the_same_weights_and_tokens_has_two_cache_entries(
    clips, tiny_files, tmp_path, monkeypatch
):
    ltx = clips["ltx"]
    mochi = other_encoders.load_mochi_clip()
    vae = tiny.load_vae(tiny_files["vae4"])
    folder = pictures(tmp_path, {"a": (128, 128)}, "tree " * 300)
    texts = [text_policy(clip).tokenize(clip, "tree " * 300).tokens for clip in (ltx, mochi)]
    assert texts[0] == texts[1]
    calls = [calls_of(monkeypatch, clip, "encode_from_tokens") for clip in (ltx, mochi)]
    for clip in (ltx, mochi, ltx):
        run(scan_images(folder), vae, clip, tmp_path)
    assert [len(batch) for batch in calls] == [1, 1]


def pictures(tmp_path, sizes, caption):
    folder = tmp_path / "photos"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for name, (width, height) in sizes.items():
        Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(caption)
    return folder


def run(dataset, vae, clip, tmp_path, **changes):
    with torch.inference_mode():  # as ComfyUI runs nodes
        return prepare(dataset, vae, clip, cache_dir=tmp_path / "cache", **{**OPTIONS, **changes})


def test_pictures_for_sdxl_are_on_whole_grids_of_64_pixels_with_the_pooled_text(clips, tiny_files, tmp_path):
    clip, vae = clips["sdxl"], tiny.load_vae(tiny_files["vae4"])
    folder = pictures(tmp_path, {"a": (300, 200), "b": (200, 300), "c": (256, 256)}, "a (red) fox")
    prepared = run(scan_images(folder), vae, clip, tmp_path)
    assert prepared.data.family == "SDXL (clip_g, clip_l)"
    assert any("fit is whole grids here, because SDXL (clip_g, clip_l) doesn't" in note for note in prepared.notes)
    expected = encode_caption(clip, text_policy(clip).tokenize(clip, "a (red) fox"), text_policy(clip))
    for sample, placement, size in zip(
        prepared.data.samples, prepared.plans[0].plan.placements, prepared.plans[0].sizes, strict=True
    ):
        _, height, width = sample.grid
        assert sample.tokens == height * width and sample.text_length == 77
        assert sample.conditioning == {"pooled_output"}
        tensors = sample.load()
        box, target = crop_box(size, placement.grid, 64)
        assert target == (height * 64, width * 64)
        with torch.inference_mode():
            latent = vae.encode(load_image(folder / sample.name, box, *target))
        assert torch.equal(tensors.latent, latent[0]) and tensors.latent.shape == (4, height * 8, width * 8)
        assert torch.equal(tensors.text, expected["cond"])
        assert torch.equal(tensors.conditioning["pooled_output"], expected["pooled_output"])
        assert not tensors.text.is_inference()


@pytest.mark.parametrize(
    ("name", "widths", "vae", "megapixels"),
    [("z-image", (48,), "vae", 0.006), ("anima", (48,), "wan_vae", 0.006), ("sdxl", (24, 24), "vae4", 0.02)],
)
def test_output_of_tiny_encoders_of_a_model_trains_the_tiny_model(name, widths, vae, megapixels, tiny_files, tmp_path):
    (row,) = (row for row in ROWS if row.name == name)
    assert sum(widths) == row.text[1]
    clip = getattr(other_encoders, f"load_{name.replace('-', '_')}_clip")(*widths)
    folder = pictures(tmp_path, {"a": (96, 64), "b": (64, 96), "c": (96, 64)}, "a fox")
    (folder / "b.txt").write_text("a very long red fox in the snow")
    prepared = run(scan_images(folder), tiny.load_vae(tiny_files[vae]), clip, tmp_path, megapixels=megapixels)
    assert all(sample.text_lengths == (sample.text_length,) for sample in prepared.data.samples)
    lengths = len({key[2] for key in prepared.data.graph_keys()})
    messages = [note for note in prepared.notes if note.startswith(f"The captions have {lengths} different lengths (")]
    assert (lengths == 1 and not messages) if name == "sdxl" else (lengths == 2 and len(messages) == 1)
    watcher = Watcher()
    train(build(row), prepared.data, tmp_path / "runs", watcher)
    assert len(watcher.losses) > 1 and all(map(math.isfinite, watcher.losses))


def test_plain_values_that_an_encoder_gives_come_back_as_they_were_and_lists_are_refused(
    clips, tiny_files, tmp_path, monkeypatch
):
    clip, vae = clips["sdxl"], tiny.load_vae(tiny_files["vae4"])
    folder = pictures(tmp_path, {"a": (128, 128)}, "a red fox")
    original, extra = clip.encode_from_tokens, {"unprocessed": True, "layers": 12, "scale": 0.5}
    monkeypatch.setattr(clip, "encode_from_tokens", lambda *args, **kwargs: original(*args, **kwargs) | extra)
    (sample,) = run(scan_images(folder), vae, clip, tmp_path).data.samples
    conditioning = sample.load().conditioning
    assert {name: conditioning[name] for name in extra} == extra and conditioning["unprocessed"] is True
    assert sample.conditioning == {"pooled_output", *extra}
    extra["tags"] = [1, 2]
    (folder / "a.txt").write_text("another caption")
    with pytest.raises(ValueError, match=r"SDXL \(clip_g, clip_l\) give tags as a list, which can't be stored; encode"):
        run(scan_images(folder), vae, clip, tmp_path)


GEOMETRY = {
    "LTX": (
        "comfy.ldm.lightricks.vae.causal_video_autoencoder.VideoVAE",
        {"decoder.up_blocks.0.res_blocks.0.conv1.conv.weight": (512,)},
        (128, 32, 8, {1: 1, 25: 25, 29: 25, 81: 81}),
    ),
    "Mochi": (
        "comfy.ldm.genmo.vae.model.VideoVAE",
        {"decoder.blocks.2.blocks.3.stack.5.weight": (1,)},
        (12, 16, 6, {1: 1, 25: 25, 29: 25}),
    ),
    "Cosmos": (
        "comfy.ldm.cosmos.vae.CausalContinuousVideoTokenizer",
        {"decoder.unpatcher3d.wavelets": (1,)},
        (16, 16, 8, {1: 1, 29: 25}),
    ),
    "MiniMax H3": (
        "comfy.ldm.minimax.vae.MiniMaxH3VideoVAE",
        {"decoder.transformer_blocks.0.scale1": (1,), "encoder.down.5.block.0.conv1.weight": (1,)},
        (24, 32, 4, {1: 1, 3: 1, 21: 5, 25: 22, 73: 73}),
    ),
    "HunyuanVideo 1.5": (
        "comfy.sd.AutoencodingEngine",
        {"decoder.conv_in.conv.weight": (1, 32, 1, 1, 1)},
        (32, 16, 4, {1: 1, 25: 25}),
    ),
    "HunyuanImage": ("comfy.sd.AutoencodingEngine", {"decoder.conv_in.weight": (1, 64, 3, 3)}, (64, 32, 0, {1: 1})),
    "pixels": ("comfy.pixel_space_convert.PixelspaceConversionVAE", {"pixel_space_vae": (1,)}, (3, 32, 0, {1: 1})),
}


@pytest.mark.parametrize("name", GEOMETRY)
def test_the_geometry_of_a_vae_is_its_own(name):
    kind, weights, (channels, pixels_per_token, frames_per_latent, frames) = GEOMETRY[name]
    policy = latent_policy(vae := other_encoders.hollow_vae(kind, weights))
    assert (policy.channels, policy.pixels_per_token) == (channels, pixels_per_token)
    assert (policy.frames_per_latent, policy.makes_video) == (frames_per_latent, frames_per_latent > 0)
    for frame_count, whole_count in frames.items():
        assert policy.whole_frames(frame_count) == whole_count
        if policy.makes_video:
            assert policy.latent_frames(whole_count) == vae.downscale_ratio[0](whole_count)


@pytest.mark.parametrize(
    ("kind", "weights", "message"),
    [
        ("comfy.sd.AudioOobleckVAE", {"decoder.layers.1.layers.0.beta": (1,)}, r"an audio VAE with 64 latent channels"),
        (
            "comfy.ldm.ace.vae.music_dcae_pipeline.MusicDCAE",
            {"vocoder.backbone.channel_layers.0.0.bias": (1,)},
            r"an audio VAE with 8 latent channels at 1/4096",
        ),
        ("comfy.ldm.hunyuan3d.vae.ShapeVAE", {"geo_decoder.cross_attn_decoder.ln_1.bias": (1,)}, r"a 3D VAE with 4"),
    ],
)
def test_vaes_of_sound_and_of_3d_are_refused(kind, weights, message):
    with pytest.raises(ValueError, match=f"The VAE is {message}.*load the VAE of a picture or video model"):
        latent_policy(other_encoders.hollow_vae(kind, weights))


def test_encoders_and_vae_of_different_families_are_refused_and_others_left_to_the_model(clips, tiny_files):
    check_pair(text_policy(clips["z_image"]), FLUX)
    check_pair(text_policy(clips["anima"]), WAN21)
    wan, vae4 = tiny.load_wan_clip(tiny_files["umt5"]), tiny.load_vae(tiny_files["vae4"])
    check_pair(text_policy(wan), latent_policy(vae4))
    with pytest.raises(ValueError, match=r"text encoders are for Wan, but the VAE is for FLUX.1"):
        check_pair(text_policy(wan), FLUX)


def test_clips_are_cut_to_what_the_vae_takes_and_the_note_names_them(tmp_path):
    pixels = VideoPixels(tmp_path / "a.mp4", "a.mp4", None, tuple(range(29)))
    items = (Item("a.mp4", "", 1, pixels), Item("b.mp4", "", 1, pixels.first(25)))
    ltx = latent_policy(other_encoders.hollow_vae(*GEOMETRY["LTX"][:2]))
    cut, notes = cut_to_latent_frames(items, ltx)
    assert [item.pixels.stamps for item in cut] == [tuple(range(25))] * 2
    assert len(notes) == 1 and "a.mp4 (29 to 25); set target_frames" in notes[0] and "b.mp4" not in notes[0]
    assert cut_to_latent_frames(items, WAN21) == (items, ())


def test_clips_for_hunyuan_video_hold_what_its_vae_encodes(clips, tmp_path):
    folder = tmp_path / "films"
    folder.mkdir()
    write_film(folder / "a.mp4", 12, size=(64, 96), caption="a film")
    vae = other_encoders.load_hunyuan_video_vae()
    prepared = run(scan_videos(folder, Extraction((9,), fps=0)), vae, clips["ltx"], tmp_path, megapixels=0.004)
    (sample,) = prepared.data.samples
    assert sample.grid[0] == 3 and sample.tokens == sample.grid[1] * sample.grid[2] * 3
    tensors = sample.load()
    assert tensors.latent.shape == (16, 3, sample.grid[1] * 2, sample.grid[2] * 2)
    assert tensors.conditioning["attention_mask"].shape == (1, 128)


@pytest.mark.parametrize("case", ["clips", "controls", "image_to_video"])
def test_inputs_that_another_encoder_or_vae_does_not_take_are_told_before_anything_is_encoded(
    clips, tiny_files, tmp_path, monkeypatch, case
):
    clip, vae = clips["sdxl"], tiny.load_vae(tiny_files["vae4"])
    encoded = [calls_of(monkeypatch, vae, "encode"), calls_of(monkeypatch, clip, "encode_from_tokens")]
    folder, changes = pictures(tmp_path, {"a": (128, 128)}, "a fox"), {}
    dataset = scan_images(folder)
    if case == "clips":
        write_film(folder / "a.mp4", 12, size=(64, 96), caption="a film")
        dataset = scan_videos(folder, Extraction((9,), fps=0))
        message = r"The VAE is TAESD \(4 channels, 1/8\), which encodes pictures only, and the data set holds clips"
    elif case == "controls":
        controls = tmp_path / "controls"
        controls.mkdir()
        Image.new("RGB", (128, 128)).save(controls / "a.png")
        dataset = scan_images(folder, control_folder=controls)
        message = r"Control pictures can't be prepared for SDXL \(clip_g, clip_l\), and 'a.png' has one; set control_fo"
    else:
        changes, message = {"image_to_video": True}, r"image_to_video is on, but only Wan has start pictures"
    with pytest.raises(ValueError, match=message):
        run(dataset, vae, clip, tmp_path, **changes)
    assert not any(encoded)


def test_latents_of_other_channels_keep_their_own_whole_grids_and_what_core_put_beside_the_text():
    sizes = {4: [(16, 24), (24, 16), (17, 8)], 64: [(5, 7), (6, 6), (3, 4)], 12: [(6, 8), (7, 8), (4, 4)]}
    grids = {4: [(2, 3), (3, 2), (2, 1)], 64: [(5, 7), (6, 6), (3, 4)], 12: [(3, 4), (3, 4), (2, 2)]}
    entry = [torch.zeros(1, 9, 8), {"pooled_output": None, "conditioning_llama3": torch.ones(1, 4, 9, 8), "layers": 4}]
    for channels, shapes in sizes.items():
        latents = [{"samples": torch.rand(1, channels, *size)} for size in shapes]
        data = latents_to_data(latents, [[entry]], 1)
        assert [sample.grid[1:] for sample in data.samples] == grids[channels]
        assert [sample.tokens for sample in data.samples] == [h * w for h, w in grids[channels]]
        assert any("each compiled: these latents are not cropped to fewer" in note for note in data.notes)
        conditioning = data.samples[0].load().conditioning
        assert torch.equal(conditioning["conditioning_llama3"], entry[1]["conditioning_llama3"])
        assert conditioning["layers"] == 4
    assert latents_to_data([{"samples": torch.rand(1, 4, 16, 16)}], [[entry]], 1).notes == ()


def test_minimax_h3_counts_channels_and_frames_as_its_vae_does():
    vae = other_encoders.hollow_vae(*GEOMETRY["MiniMax H3"][:2])
    vae_policy, model_policy = latent_policy(vae), MINIMAX_LATENTS
    assert (model_policy.channels, model_policy.pixels_per_token) == (vae_policy.channels, vae_policy.pixels_per_token)
    for frames in range(1, 200):
        assert model_policy.latent_frames(frames) == vae_policy.latent_frames(frames)
        assert model_policy.whole_frames(frames) == vae_policy.whole_frames(frames)

"""Presets of Train LoRA on the server: the inputs of a prompt count, and a preset that they don't match is told."""

import re

import pytest
from tessera.models.catalogue.registry import FAMILIES, known_by_file_name
from tessera.models.native.facts.lookup import NAMED
from tessera.nodes.train.presets import CUSTOM, PRESETS, preset_notes
from tiny.nodes.prompt import node

FLUX, WAN = (next(family for family in FAMILIES if family.name == name) for name in ("flux", "wan"))
FACE = {"steps": 1000, "rank": 16, "gradient_accumulation": 1, "learning_rate": 1e-4}


def test_a_preset_that_the_inputs_match_is_told_nothing_of():
    assert preset_notes("face, quick", FLUX, FACE) == []
    assert preset_notes("face, quick", WAN, {**FACE, "learning_rate": 2e-4}) == []
    assert preset_notes(CUSTOM, FLUX, {}) == []
    assert len(PRESETS) == 12


def test_a_preset_that_the_inputs_do_not_match_is_named_with_both():
    (note,) = preset_notes("face, quick", WAN, {**FACE, "rank": 8})
    assert note.startswith(
        "The preset 'face, quick' means rank 16, learning_rate 0.0002 for Wan 2.1 and 2.2, but this run uses rank 8, "
        "learning_rate 0.0001, as set on the inputs."
    )


def test_a_motion_is_for_models_of_video():
    with pytest.raises(ValueError, match="FLUX.1 makes pictures; choose a face"):
        preset_notes("motion, best", FLUX, FACE)
    with pytest.raises(ValueError, match="preset is 'cat'; choose one of custom, face, quick"):
        preset_notes("cat", FLUX, FACE)


@pytest.mark.parametrize(
    ("file", "title", "rate"),
    [
        ("wan2.1_t2v_1.3B_fp16", "Wan 2.1 and 2.2", 2e-4), ("hunyuan_video_t2v_720p_bf16", "HunyuanVideo", 2e-4),
        ("hunyuanvideo1.5_720p_t2v", "HunyuanVideo 1.5", 1e-4), ("ltxv-2b-0.9", "LTX-Video", 2e-4),
        ("ltx-2-19b-dev-fp8", "LTX-2", 1e-4), ("ltx-2.3-22b", "LTX-2", 1e-4), ("ltx-video-2b-v0.9", "LTX-Video", 2e-4),
        ("qwen_image_fp8", "Qwen-Image", 5e-5), ("flux-2-dev", "FLUX.2", 1e-4), ("flux1-krea-dev", "FLUX.1", 1e-4),
        ("flux.1-dev", "FLUX.1", 1e-4), ("sd_xl_base_1.0", "SDXL", 1e-4), ("v1-5-pruned", "SD 1.5", 1e-4),
        ("swan", None, None), ("hunyuanimage2.1", None, None),
    ],
)  # fmt: skip
def test_file_names_tell_the_model_and_its_rate(file, title, rate):
    rows = ((title, usual.learning_rate) for title, usual in known_by_file_name() if re.search(usual.file_names, file))
    assert next(rows, (None, None)) == (title, rate)


def test_file_names_of_every_named_release_tell_no_other_rate_than_the_row_s():
    for facts in NAMED:
        for release in facts.releases:
            usuals = [usual for _, usual in known_by_file_name() if re.search(usual.file_names, release.file.lower())]
            rates = {usual.learning_rate for usual in (*usuals[:1], facts.usual)}
            pictures = {usual.pictures_only for usual in (*usuals[:1], facts.usual)}
            assert len(rates) == len(pictures) == 1, release


def test_a_preset_is_no_part_of_a_run_and_is_not_compared_with_what_connected_options_set(server, tiny_loaders):
    inputs = {"output_name": "of a preset", "steps": 1, "learning_rate": 1e-3, "rank": 4, "batch_size": 1, "seed": 0}
    inputs |= {"gradient_accumulation": 1, "compile": "off", "save_every": 0, "resume": "latest"}
    network = {"algorithm": "lora", "rank": 2, "alpha": 2.0, "targets": "*", "dropout": 0.0}
    optimizer_inputs = {"optimizer": "adamw", "learning_rate": 2e-3, "lr_scheduler": "constant", "warmup_steps": 0}
    prompt = tiny_loaders | {
        "latent": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "positive": node("CLIPTextEncode", clip=["clip", 0], text="a fox"),
        "data": node("TesseraLatentsToDataset", latents=["latent", 0], positive=["positive", 0]),
        "network": node("TesseraLoraNetwork", **network),
        "optimizer": node("TesseraOptimizer", **optimizer_inputs, max_grad_norm=1.0),
    }
    linked = {"network": ["network", 0], "optimizer": ["optimizer", 0]}
    runs = []
    for preset in ("face, quick", CUSTOM):
        train = node("TesseraTrainLora", model=["model", 0], data=["data", 0], **inputs, **linked, preset=preset)
        runs += server.run(prompt | {"train": train})["outputs"]["train"]["tessera"]
    assert runs[0]["key"] == runs[1]["key"] and runs[0]["path"] == runs[1]["path"]
    (note,) = [note for note in runs[0]["notes"] if note.startswith("The preset")]
    assert note.startswith("The preset 'face, quick' means steps 1000 for FLUX.1, but this run uses steps 1, as set")

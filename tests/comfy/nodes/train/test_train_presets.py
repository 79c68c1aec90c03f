"""Presets of Train LoRA on the server: the inputs of a prompt count, and a preset that they don't match is told."""

import re

import pytest
from tessera.nodes.train.presets import CUSTOM, FAMILIES, PRESETS, preset_notes
from tiny.nodes.prompt import node

FACE = {"steps": 1000, "rank": 16, "gradient_accumulation": 1, "learning_rate": 1e-4}


def test_a_preset_that_the_inputs_match_is_told_nothing_of():
    assert preset_notes("face, quick", "FLUX.1", FACE) == []
    assert preset_notes("face, quick", "Wan 2.1", {**FACE, "learning_rate": 2e-4}) == []
    assert preset_notes(CUSTOM, "FLUX.1", {}) == []
    assert len(PRESETS) == 12


def test_a_preset_that_the_inputs_do_not_match_is_named_with_both():
    (note,) = preset_notes("face, quick", "Wan 2.1", {**FACE, "rank": 8})
    assert note.startswith(
        "The preset 'face, quick' means rank 16, learning_rate 0.0002 for Wan 2.1, but this run uses rank 8, "
        "learning_rate 0.0001, as set on the inputs."
    )


def test_a_motion_is_for_models_of_video():
    with pytest.raises(ValueError, match="FLUX.1 makes pictures; choose one of a face"):
        preset_notes("motion, best", "FLUX.1", FACE)
    with pytest.raises(ValueError, match="preset is 'cat'; choose one of custom, face, quick"):
        preset_notes("cat", "FLUX.1", FACE)


@pytest.mark.parametrize(
    ("title", "name", "rate"),
    [
        ("Wan 2.2", "Wan", 2e-4), ("HunyuanVideo", "HunyuanVideo", 2e-4), ("LTX-Video", "LTX-Video", 2e-4),
        ("HunyuanVideo 1.5", "HunyuanVideo 1.5", 1e-4), ("hunyuanvideo1.5_720p_t2v", "HunyuanVideo 1.5", 1e-4),
        ("hunyuan_video_t2v_720p_bf16", "HunyuanVideo", 2e-4), ("LTX-2", "LTX-2", 1e-4),
        ("ltxv-2b-0.9", "LTX-Video", 2e-4),
        ("ltx-2-19b-dev-fp8", "LTX-2", 1e-4), ("ltx-2.3-22b", "LTX-2", 1e-4), ("ltx-video-2b-v0.9", "LTX-Video", 2e-4),
        ("Qwen-Image", "Qwen-Image", 5e-5), ("FLUX.2", "FLUX", 1e-4), ("HiDream", "HiDream", 2e-4),
        ("SDXL", "SDXL", 1e-4), ("SD 1.5", "SD", 1e-4), ("Swan", None, None), ("HunyuanImage 2.1", None, None),
    ],
)  # fmt: skip
def test_families_are_known_by_title_and_by_file_with_their_rate(title, name, rate):
    found = next(((f[0], f[3]) for f in FAMILIES if re.search(f[1], title.lower())), (None, None))
    assert found == (name, rate)


def test_a_preset_is_no_part_of_a_run_and_is_not_compared_with_what_connected_options_set(server, tiny_loaders):
    inputs = {"output_name": "of a preset", "steps": 1, "learning_rate": 1e-3, "rank": 4, "batch_size": 1, "seed": 0}
    inputs |= {"gradient_accumulation": 1, "compile": "off", "save_every": 0, "resume": "latest"}
    network = {"algorithm": "lora", "rank": 2, "alpha": 2.0, "targets": "*", "dropout": 0.0}
    of_optimizer = {"optimizer": "adamw", "learning_rate": 2e-3, "lr_scheduler": "constant", "warmup_steps": 0}
    prompt = tiny_loaders | {
        "latent": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "positive": node("CLIPTextEncode", clip=["clip", 0], text="a fox"),
        "data": node("TesseraLatentsToDataset", latents=["latent", 0], positive=["positive", 0]),
        "network": node("TesseraLoraNetwork", **network),
        "optimizer": node("TesseraOptimizer", **of_optimizer, max_grad_norm=1.0),
    }
    linked = {"network": ["network", 0], "optimizer": ["optimizer", 0]}
    runs = []
    for preset in ("face, quick", CUSTOM):
        train = node("TesseraTrainLora", model=["model", 0], data=["data", 0], **inputs, **linked, preset=preset)
        runs += server.run(prompt | {"train": train})["outputs"]["train"]["tessera"]
    assert runs[0]["key"] == runs[1]["key"] and runs[0]["path"] == runs[1]["path"]
    (note,) = [note for note in runs[0]["notes"] if note.startswith("The preset")]
    assert note.startswith("The preset 'face, quick' means steps 1000 for FLUX.1, but this run uses steps 1, as set")

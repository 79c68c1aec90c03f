"""The workflows that train with ComfyUI's own forward, beside ComfyUI's templates of the same models."""

import json
from pathlib import Path
from typing import Any

import pytest
from workflow_templates import cfg_of, files_of, samplers_of, schedulers_of, steps_of, values

WORKFLOWS = Path(__file__).resolve().parents[3] / "workflows"
# Each workflow, its template, and files that no template has.
TEMPLATES = {
    "z_image_lora": ("image_z_image", set()),
    "krea2_lora": ("image_krea2_turbo_t2i", {"krea2_raw_fp8_scaled.safetensors"}),
    "anima_lora": ("image_anima_base_v1", set()),
    "sdxl_lora": ("sdxl_simple_example", set()),
    "hunyuan_video15_lora": ("video_hunyuan_video_1.5_720p_t2v", set()),
    "ltx_video_lora": ("ltxv_text_to_video", set()),
    "ltx2_3_lora": ("video_ltx2_3_t2v", set()),
    "minimax_h3_lora": ("video_minimax_h3_t2v", {"minimax_h3_training_adapter_v1.safetensors"}),
}
# Workflows whose template is newer than the pinned ComfyUI's package, kept as data.
NEWER = {
    "qwen_image21_lora": "image_qwen_image_2_1_t2i",
    "flux3_klein_lora": "image_flux3_klein_t2i",
    "ltx2_5_lora": "video_ltx2_5_t2v",
}
NEWER_TEMPLATES = json.loads((WORKFLOWS.parent / "tests" / "data" / "newer_templates.json").read_text("utf-8"))


def nodes(name: str) -> list[dict[str, Any]]:
    return json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))["nodes"]


def inputs(name: str, kind: str) -> dict[str, Any]:
    prompt = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
    (values,) = (node["inputs"] for node in prompt.values() if node["class_type"] == kind)
    return values


@pytest.mark.parametrize("name", TEMPLATES)
def test_files_and_their_addresses_are_those_of_the_template(name):
    template, other_names = TEMPLATES[name]
    template_files = files_of(template)
    links = [link for node in nodes(name) for link in node.get("properties", {}).get("models", [])]
    assert {link["name"] for link in links} - template_files.keys() == other_names
    for link in links:
        if link["name"] not in other_names:
            assert (link["directory"], link["url"]) == template_files[link["name"]]


@pytest.mark.parametrize(("name", "template"), NEWER.items())
def test_a_workflow_of_a_newer_model_has_files_and_sampling_of_its_template(name, template):
    model, vae, encoder, kind, steps, cfg, sampler, scheduler = NEWER_TEMPLATES["templates"][template]
    links = {
        m["name"]: [m["directory"], m["url"]] for n in nodes(name) for m in n.get("properties", {}).get("models", [])
    }
    assert links.keys() >= {model, vae, encoder} and links.items() <= NEWER_TEMPLATES["files"][template].items()
    assert inputs(name, "TesseraLoadDiffusionModel")["unet_name"] == model
    clip = inputs(name, "CLIPLoader")
    assert (clip["clip_name"], clip["type"]) == (encoder, kind)
    if name == "ltx2_5_lora":  # with sigmas of its own
        sigmas = inputs(name, "ManualSigmas")["sigmas"].split(",")
        assert (len(sigmas) - 1, inputs(name, "SamplerCustom")["cfg"]) == (steps, cfg)
        assert (
            inputs(name, "KSamplerSelect")["sampler_name"] == sampler == inputs(name, "TesseraPreview")["sampler_name"]
        )
        assert inputs(name, "TesseraPreview")["steps"] == steps
    else:
        of_sampler = inputs(name, "KSampler")
        assert [of_sampler[key] for key in ("steps", "cfg", "sampler_name", "scheduler")] == [
            steps, cfg, sampler, scheduler
        ]  # fmt: skip


KSAMPLERS = [name for name in TEMPLATES if name not in ("ltx_video_lora", "ltx2_3_lora")]
# Nodes whose inputs are all those of the template, by name of the workflow.
AS_IN_TEMPLATE = [
    ("z_image_lora", "ModelSamplingAuraFlow", ["shift"]),
    ("hunyuan_video15_lora", "ModelSamplingSD3", ["shift"]),
    ("hunyuan_video15_lora", "DualCLIPLoader", ["clip_name1", "clip_name2", "type", "device"]),
    ("ltx_video_lora", "LTXVScheduler", ["steps", "max_shift", "base_shift", "stretch", "terminal"]),
    ("ltx_video_lora", "KSamplerSelect", ["sampler_name"]),
    ("ltx_video_lora", "LTXVConditioning", ["frame_rate"]),
    ("ltx_video_lora", "EmptyLTXVLatentVideo", ["width", "height", "length", "batch_size"]),
    ("ltx2_3_lora", "CheckpointLoaderSimple", ["ckpt_name"]),
    ("ltx2_3_lora", "LTXAVTextEncoderLoader", ["text_encoder", "ckpt_name", "device"]),
    ("ltx2_3_lora", "LTXVAudioVAELoader", ["ckpt_name"]),
    ("ltx2_3_lora", "LoraLoaderModelOnly", ["lora_name", "strength_model"]),
    ("ltx2_3_lora", "EmptyLTXVLatentVideo", ["width", "height", "length", "batch_size"]),
    ("ltx2_3_lora", "LTXVEmptyLatentAudio", ["frames_number", "frame_rate", "batch_size"]),
    ("ltx2_3_lora", "ManualSigmas", ["sigmas"]),
    ("ltx2_3_lora", "KSamplerSelect", ["sampler_name"]),
]
AS_IN_TEMPLATE += [
    (name, "CLIPLoader", ["clip_name", "type", "device"])
    for name in ("z_image_lora", "krea2_lora", "anima_lora", "ltx_video_lora", "minimax_h3_lora")
]


@pytest.mark.parametrize("name", KSAMPLERS)
def test_sampler_steps_and_cfg_are_those_of_the_template(name):
    template, _ = TEMPLATES[name]
    sampler = inputs(name, "KSampler")
    assert sampler["steps"] in steps_of(template) and sampler["cfg"] in cfg_of(template)
    assert sampler["sampler_name"] in samplers_of(template) and sampler["scheduler"] in schedulers_of(template)


@pytest.mark.parametrize(("name", "kind", "names"), AS_IN_TEMPLATE)
def test_a_node_has_the_inputs_that_it_has_in_the_template(name, kind, names):
    template, _ = TEMPLATES[name]
    node_inputs = inputs(name, kind)
    assert [node_inputs[key] for key in names] in list(values(template, kind))


@pytest.mark.parametrize("name", ["ltx_video_lora", "ltx2_3_lora"])
def test_ltx_is_sampled_with_the_cfg_of_its_template(name):
    assert inputs(name, "SamplerCustom")["cfg"] in cfg_of(TEMPLATES[name][0])


@pytest.mark.parametrize("name", ["ltx_video_lora", "ltx2_3_lora", "ltx2_5_lora"])
def test_ltx_is_told_the_frame_rate_of_its_clips_and_has_lengths_that_its_vae_takes(name):
    rates = [inputs(name, kind)["fps"] for kind in ("TesseraVideoFolder", "CreateVideo", "TesseraPreview")]
    assert rates == [inputs(name, "LTXVConditioning")["frame_rate"]] * 3
    lengths = [
        *inputs(name, "TesseraVideoFolder")["target_frames"].split(","),
        inputs(name, "TesseraPreview")["frames"],
    ]
    assert all(int(frames) % 8 == 1 for frames in lengths)


def test_ltx_2_3_trains_without_the_distilled_lora_and_is_seen_and_sampled_with_it():
    prompt = json.loads((WORKFLOWS / "api" / "ltx2_3_lora.json").read_text(encoding="utf-8"))
    kinds = {node["class_type"]: key for key, node in prompt.items()}
    distilled = [kinds["LoraLoaderModelOnly"], 0]
    assert inputs("ltx2_3_lora", "TesseraTrainLora")["model"] == [kinds["CheckpointLoaderSimple"], 0]
    assert inputs("ltx2_3_lora", "TesseraPreview")["model"] == distilled
    assert inputs("ltx2_3_lora", "LoraModelLoader")["model"] == distilled
    steps = len(inputs("ltx2_3_lora", "ManualSigmas")["sigmas"].split(",")) - 1
    assert inputs("ltx2_3_lora", "TesseraPreview")["steps"] == steps


def test_minimax_h3_has_the_frame_rate_of_its_template_and_clips_of_lengths_that_its_vae_takes():
    rates = [inputs("minimax_h3_lora", kind)["fps"] for kind in ("TesseraVideoFolder", "CreateVideo")]
    assert rates == [next(values("video_minimax_h3_t2v", "CreateVideo"))[0]] * 2
    lengths = inputs("minimax_h3_lora", "TesseraVideoFolder")["target_frames"].split(",")
    lengths += [inputs("minimax_h3_lora", "TesseraPreview")["frames"]]
    assert all(int(frames) % 17 == 5 for frames in lengths)

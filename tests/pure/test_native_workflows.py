"""The workflows that train with ComfyUI's own forward, beside ComfyUI's templates of the same models."""

import json
from pathlib import Path
from typing import Any

import pytest
from workflow_templates import cfg_of, files_of, samplers_of, schedulers_of, steps_of, values

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
# Each workflow, its template, and files that no template has.
TEMPLATES = {
    "z_image_lora": ("image_z_image", set()),
    "krea2_lora": ("image_krea2_turbo_t2i", {"krea2_raw_fp8_scaled.safetensors"}),
    "anima_lora": ("image_anima_base_v1", set()),
    "sdxl_lora": ("sdxl_simple_example", set()),
}


def nodes(name: str) -> list[dict[str, Any]]:
    return json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))["nodes"]


def inputs(name: str, kind: str) -> dict[str, Any]:
    prompt = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
    (found,) = (node["inputs"] for node in prompt.values() if node["class_type"] == kind)
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_files_and_their_addresses_are_those_of_the_template(name):
    template, others = TEMPLATES[name]
    there = files_of(template)
    links = [link for node in nodes(name) for link in node.get("properties", {}).get("models", [])]
    assert {link["name"] for link in links} - there.keys() == others
    for link in links:
        if link["name"] not in others:
            assert (link["directory"], link["url"]) == there[link["name"]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_sampler_steps_and_cfg_are_those_of_the_template(name):
    template, _ = TEMPLATES[name]
    sampler = inputs(name, "KSampler")
    assert sampler["steps"] in steps_of(template) and sampler["cfg"] in cfg_of(template)
    assert sampler["sampler_name"] in samplers_of(template) and sampler["scheduler"] in schedulers_of(template)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "sdxl_lora"])
def test_the_text_encoder_is_loaded_as_in_the_template(name):
    template, _ = TEMPLATES[name]
    loader = inputs(name, "CLIPLoader")
    assert [loader["clip_name"], loader["type"], loader["device"]] in list(values(template, "CLIPLoader"))


def test_z_image_is_sampled_with_the_shift_of_its_template():
    assert [inputs("z_image_lora", "ModelSamplingAuraFlow")["shift"]] in list(
        values("image_z_image", "ModelSamplingAuraFlow")
    )

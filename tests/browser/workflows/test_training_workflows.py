"""The workflows that train LoRAs or prepare for it, in ComfyUI's own frontend: they open without a fault and equal
their API form."""

import json

import pytest
from comfy_server import PACK

playwright = pytest.importorskip("playwright.sync_api")

NAMES = ["wan_t2v_lora", "wan_i2v_lora", "wan22_two_experts_lora", "qwen_image_lora", "qwen_edit_lora"]
NAMES += [
    "chroma_lora",
    "z_image_lora",
    "krea2_lora",
    "qwen_image21_lora",
    "flux3_klein_lora",
    "anima_lora",
    "sdxl_lora",
    "hunyuan_video15_lora",
    "ltx_video_lora",
    "ltx2_3_lora",
    "ltx2_5_lora",
    "minimax_h3_lora",
    "flux_kontext_lora",
    "flux2_lora",
    "everything_at_once",
    "lora_with_everything",
    "lora_with_validation",
    "which_picture_hurts",
    "prepare_folder",
    "compare_loras",  # last: it is looked at below
]


def test_each_workflow_opens_without_a_fault_and_equals_its_api_form(frontend):
    for name in NAMES:
        frontend.drop((PACK / "workflows" / f"{name}.json").read_text(encoding="utf-8"))
        assert frontend.faults() == {}, name
        api = json.loads((PACK / "workflows" / "api" / f"{name}.json").read_text(encoding="utf-8"))
        for prompt in (graph_prompt := frontend.prompt(), api):
            for node in prompt.values():
                node.pop("_meta")
        assert graph_prompt == api, name
    labels = frontend.page.evaluate(
        "app.graph.nodes.find((n) => n.type === 'TesseraCompareLoras').inputs.map((i) => i.label)"
    )
    assert {"lora0", "low noise lora0"} <= set(labels)  # the places of the two experts are told apart
    assert frontend.crashes == []


def test_outputs_of_the_low_noise_expert_are_labelled_so_and_keep_their_names(frontend):
    frontend.drop((PACK / "workflows" / "wan22_two_experts_lora.json").read_text(encoding="utf-8"))
    outputs = frontend.page.evaluate(
        "app.graph.nodes.find((n) => n.type === 'TesseraTrainLora')"
        ".outputs.map((output) => [output.name, output.label ?? output.localized_name])"
    )
    assert [label for _, label in outputs][3:6] == ["lora (low noise)", "loss (low noise)", "path (low noise)"]
    assert [name for name, _ in outputs][3:6] == ["lora_low_noise", "loss_low_noise", "path_low_noise"]

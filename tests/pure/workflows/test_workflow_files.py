"""Contents of a shared workflow for somebody who has none of the files yet, and that its two forms are one graph."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

WORKFLOWS = Path(__file__).resolve().parents[3] / "workflows"
UI = sorted(path.name for path in WORKFLOWS.glob("*.json"))
NOT_SWAPPED = [f"{name}.json" for name in ("compare_loras", "flux_compile", "qwen_image_compile", "wan_compile")]
OWN_MODELS = "try_it.json"  # which takes those of the pack
BYPASSED = 4  # the mode of a node that rests
FOLDERS = ("diffusion_models", "text_encoders", "vae", "clip_vision", "checkpoints", "loras")  # below `models`
COMPILED = [name for name in UI if name.endswith(("_compile.json", "_block_swap.json"))]


def load(name: str) -> dict[str, Any]:
    return json.loads((WORKFLOWS / name).read_text(encoding="utf-8"))


def load_api(name: str) -> dict[str, Any]:
    return json.loads((WORKFLOWS / "api" / name).read_text(encoding="utf-8"))


def prompt_of(workflow: dict[str, Any]) -> dict[str, Any]:
    """The API form of a saved graph: nodes with their values and links, without notes and bypassed nodes."""
    origins = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        if node["type"] == "MarkdownNote" or node["mode"] == BYPASSED:
            continue
        values = iter(node["widgets_values"])
        inputs: dict[str, Any] = {}
        for slot in node["inputs"]:
            if "widget" in slot:
                inputs[slot["name"]] = next(values)
                if slot["name"] in ("seed", "noise_seed"):
                    assert next(values) in ("fixed", "randomize")  # the widget below it, which is no input
            if slot["link"] is not None:
                inputs[slot["name"]] = origins[slot["link"]]
        assert list(values) == [], f"{node['type']} has more values than inputs"
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


@pytest.mark.parametrize("name", UI)
def test_every_model_file_that_a_workflow_names_has_a_download_link_and_its_folder(name):
    nodes = load(name)["nodes"]
    file_names = {v for node in nodes for v in node.get("widgets_values") or [] if str(v).endswith(".safetensors")}
    links = [model for node in nodes for model in node.get("properties", {}).get("models", [])]
    assert bool(file_names) != (name == OWN_MODELS) and file_names == {model["name"] for model in links}
    for model in links:
        assert model["url"].startswith("https://") and model["name"] in model["url"]
        assert model["directory"] in FOLDERS


@pytest.mark.parametrize("name", UI)
def test_a_note_links_every_model_file_on_the_line_that_says_its_folder(name):
    nodes = load(name)["nodes"]
    lines = [line for node in nodes if node["type"] == "MarkdownNote" for line in node["widgets_values"][0].split("\n")]
    for model in [model for node in nodes for model in node.get("properties", {}).get("models", [])]:
        (line,) = (line for line in lines if f"[{model['name']}]({model['url']})" in line)
        assert line.endswith(f"in `{model['directory']}`")


@pytest.mark.parametrize("name", UI)
def test_every_workflow_has_a_thumbnail_that_can_be_read(name):
    with Image.open((WORKFLOWS / name).with_suffix(".jpg"), formats=["JPEG"]) as picture:
        assert picture.width >= 1200 and picture.height >= 450


@pytest.mark.parametrize("name", UI)
def test_the_graph_and_the_api_form_are_the_same(name):
    api_nodes = {key: {k: node[k] for k in ("class_type", "inputs")} for key, node in load_api(name).items()}
    assert prompt_of(load(name)) == api_nodes


@pytest.mark.parametrize("name", UI)
def test_links_nodes_and_slots_agree_with_one_another(name):
    workflow = load(name)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    assert workflow["last_node_id"] == max(nodes) and len(nodes) == len(workflow["nodes"])
    for number, origin, output, target, slot, kind in workflow["links"]:
        assert number in nodes[origin]["outputs"][output]["links"] and nodes[origin]["outputs"][output]["type"] == kind
        assert nodes[target]["inputs"][slot]["link"] == number
    numbers = {link[0] for link in workflow["links"]}
    assert max(numbers) == workflow["last_link_id"] and len(numbers) == len(workflow["links"])
    assert {slot["link"] for node in nodes.values() for slot in node["inputs"]} - {None} == numbers
    assert {n for node in nodes.values() for slot in node["outputs"] for n in slot["links"] or ()} == numbers


def test_workflows_to_share_are_there_for_everything():
    compiling = ["flux_compile", "qwen_image_compile", "wan_compile"]
    training = ["flux_lora", "flux_kontext_lora", "flux2_lora", "qwen_image_lora", "qwen_edit_lora", "chroma_lora"]
    training += ["z_image_lora", "krea2_lora", "anima_lora", "sdxl_lora", "hunyuan_video15_lora", "ltx_video_lora"]
    training += ["ltx2_3_lora", "minimax_h3_lora", "qwen_image21_lora", "flux3_klein_lora", "ltx2_5_lora"]
    training += ["wan_t2v_lora", "wan_i2v_lora", "wan22_two_experts_lora", "everything_at_once", "lora_with_everything"]
    training += ["lora_with_validation", "which_picture_hurts", "try_it", "age_slider"]
    assert UI == sorted(
        f"{name}.json" for name in ["flux_block_swap", "compare_loras", "prepare_folder", *compiling, *training]
    )


@pytest.mark.parametrize("name", UI)
def test_every_workflow_that_trains_fits_its_model_to_the_card(name):
    loaders = [n["inputs"] for n in load_api(name).values() if n["class_type"] == "TesseraLoadDiffusionModel"]
    if name in ("sdxl_lora.json", "ltx_video_lora.json", "ltx2_3_lora.json", OWN_MODELS, "prepare_folder.json"):
        assert loaders == []  # a checkpoint, or tiny models
        return
    assert len(loaders) == (2 if name == "wan22_two_experts_lora.json" else 1)
    assert {inputs["blocks_to_swap"] for inputs in loaders} == {0 if name in NOT_SWAPPED else -1}


@pytest.mark.parametrize("name", COMPILED)
def test_the_model_goes_through_compile_model_to_the_sampler_and_the_report_waits_for_its_latent(name):
    prompt = load_api(name)
    keys_by_kind = {node["class_type"]: key for key, node in prompt.items()}
    inputs = {kind: prompt[key]["inputs"] for kind, key in keys_by_kind.items()}
    compiled = [keys_by_kind["TesseraCompileModel"], 0]
    assert inputs["TesseraCompileModel"]["model"] == [keys_by_kind["TesseraLoadDiffusionModel"], 0]
    model = inputs["KSampler"]["model"]
    while model != compiled:  # what shifts the sigmas stands between
        model = prompt[model[0]]["inputs"]["model"]
    assert inputs["TesseraCompileReport"] == {"model": compiled, "after": [keys_by_kind["KSampler"], 0]}


@pytest.mark.parametrize("name", COMPILED)
def test_a_second_press_of_run_samples_again(name):
    (sampler,) = (node for node in load(name)["nodes"] if node["type"] == "KSampler")
    assert sampler["widgets_values"][1] == "randomize"

"""The shared workflow in ComfyUI's own frontend: it trains, and equals the API workflow."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from comfy_server import PACK, ComfyServer
from PIL import Image
from renderers import renderers
from safetensors import safe_open
from safetensors.torch import load_file

playwright = pytest.importorskip("playwright.sync_api")

UI_WORKFLOW = PACK / "workflows" / "flux_lora.json"
API_WORKFLOW = PACK / "workflows" / "api" / "flux_lora.json"
# What a user would type to make the run small; the same values go into the API prompt.
SMALL = {
    "TesseraPrepareDataset": {"megapixels": 0.06},
    "TesseraTrainLora": {"steps": 3, "compile": "off"},
    "EmptySD3LatentImage": {"width": 128, "height": 128},
    "KSampler": {"steps": 2},
    "TesseraPreview": {"width": 128, "height": 128, "steps": 2},
    "TesseraMemory": {"blocks_to_swap": 0},
}


@pytest.fixture(scope="module", autouse=True)
def pictures(comfyui: ComfyServer) -> None:
    folder = comfyui.base / "input" / "my_pictures"
    folder.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate([(320, 200), (200, 320), (256, 256), (360, 180)]):
        ramp = Image.linear_gradient("L").rotate(90 * number).resize(size)
        Image.merge("RGB", [ramp, ramp.transpose(Image.Transpose.FLIP_TOP_BOTTOM), ramp]).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a colour ramp, number {number}\n", encoding="utf-8")


def small_api_prompt(output_name: str, encoders: dict[str, str]) -> dict[str, Any]:
    prompt = json.loads(API_WORKFLOW.read_text(encoding="utf-8"))
    for node in prompt.values():
        node["inputs"] |= SMALL.get(node["class_type"], {})
        if node["class_type"] == "DualCLIPLoader":
            node |= {"class_type": "TesseraTinyClipLoader", "inputs": dict(encoders)}
        if node["class_type"] == "TesseraTrainLora":
            node["inputs"]["output_name"] = output_name
    return prompt


def node_of(prompt: dict[str, Any], kind: str) -> str:
    (match,) = (key for key, node in prompt.items() if node["class_type"] == kind)
    return match


def trained_file(server: ComfyServer, entry: dict[str, Any]) -> Path:
    prompt = entry["prompt"][2]
    (summary,) = entry["outputs"][node_of(prompt, "TesseraTrainLora")]["tessera"]
    assert summary["status"] == "finished" and summary["steps_done"] == SMALL["TesseraTrainLora"]["steps"]
    return server.base / "output" / summary["path"]


def test_description_of_the_workflow_stands_in_the_list_of_templates(frontend):
    """Frontend 1.58 shows no descriptions."""
    texts = json.loads((PACK / "locales" / "en" / "main.json").read_text(encoding="utf-8"))["templateWorkflows"]
    frontend.page.evaluate("app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    frontend.page.get_by_text("Tessera: LoRA training").first.click()
    frontend.page.get_by_text(texts["template"]["tessera"]["flux_lora"], exact=True).hover()  # newer ones ask for it
    playwright.expect(frontend.page.get_by_text(texts["templateDescription"]["tessera"]["flux_lora"])).to_be_visible()


def test_the_frontend_says_so_where_a_node_or_a_model_of_the_workflow_is_missing(frontend):
    text = UI_WORKFLOW.read_text(encoding="utf-8")
    frontend.drop(
        text.replace('"TesseraTrainLora"', '"TesseraAbsent"').replace("flux1-dev.safetensors", "absent.safetensors")
    )
    faults = frontend.faults()
    assert faults["overlay"] and faults["unknown"] == ["TesseraAbsent"]
    assert "TesseraLoadDiffusionModel" in faults["red_nodes"]


def without_titles(prompt: dict[str, Any]) -> dict[str, Any]:
    return {key: {"class_type": node["class_type"], "inputs": node["inputs"]} for key, node in prompt.items()}


@renderers("canvas renderer")
def test_the_run_button_trains_and_the_api_workflow_gives_the_same_lora(frontend, comfyui, new_renderer):
    name = f"ui_{new_renderer}"
    frontend.use_new_renderer(new_renderer)
    frontend.drop(UI_WORKFLOW.read_text(encoding="utf-8"))
    frontend.use_tiny_encoders()
    values = copy.deepcopy(SMALL)
    values["TesseraTrainLora"]["output_name"] = name
    values["TesseraSaveLora"] = {"save_workflow": True}
    frontend.set_widgets(values)
    prompt, entry = frontend.run()
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"]
    assert frontend.faults() == {}

    graph_file = trained_file(comfyui, entry)
    pictures = {
        image["filename"] for output in entry["outputs"].values() for image in output.get("images", ())
        if image["type"] == "output" and (comfyui.base / "output" / image["filename"]).is_file()
    }  # fmt: skip
    assert any("_without_" in file for file in pictures) and any("_with_" in file for file in pictures)
    reports = frontend.page.locator(".tessera-report")
    playwright.expect(reports.filter(has_text=graph_file.name)).to_be_visible()
    playwright.expect(reports.filter(has_text="is cropped on average")).to_be_visible()
    live = frontend.page.evaluate("app.graph.nodes.find((n) => n.type === 'TesseraTrainLora').tessera.lines")
    assert f"Saved: {graph_file.name}" in live  # told by an event while the run went on
    values = frontend.page.evaluate(
        "app.graph.serialize().nodes.find((n) => n.type === 'TesseraTrainLora').widgets_values"
    )
    assert len(values) == len(shared_values("TesseraTrainLora"))  # the report is no value of the workflow
    assert frontend.crashes == []

    posted = comfyui.run(small_api_prompt(f"api_{new_renderer}", frontend.ENCODERS))
    api_file = trained_file(comfyui, posted)
    assert api_file != graph_file
    assert same_tensors(graph_file, api_file)
    saved = comfyui.base / "output" / "loras"
    for kind in ("ui", "api"):  # Save LoRA takes the run's name
        assert len(list(saved.glob(f"{kind}_{new_renderer}_0*.safetensors"))) == 1
    with safe_open(graph_file, framework="pt") as file:
        assert str(comfyui.base) not in json.dumps(file.metadata())

    (picture,) = entry["outputs"][node_of(prompt, "TesseraSaveLora")]["tessera"]
    carrying = {saved / picture["filename"]: "", graph_file.parent / "previews" / "sheet.png": "image/png"}
    opened = frontend.page.evaluate("app.graph.id")
    for file, kind in carrying.items():
        frontend.page.evaluate("app.loadGraphData({ nodes: [], links: [], groups: [], version: 0.4 })")
        frontend.drop_file(file.name, kind, file.read_bytes(), opened)
        assert without_titles(frontend.prompt()) == without_titles(prompt) and frontend.faults() == {}


def shared_values(kind: str) -> list[Any]:
    nodes = json.loads(UI_WORKFLOW.read_text(encoding="utf-8"))["nodes"]
    (values,) = (node["widgets_values"] for node in nodes if node["type"] == kind)
    return values


def same_tensors(first: Path, second: Path) -> bool:
    a, b = load_file(first), load_file(second)
    return bool(a) and a.keys() == b.keys() and all(a[key].equal(b[key]) for key in a)

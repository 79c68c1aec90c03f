"""The shared workflow in ComfyUI's own frontend: it opens without a fault, trains, and equals the API workflow."""

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from comfy_server import PACK, ComfyServer
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from tessera_dev import find_chromium, find_comfyui

playwright = pytest.importorskip("playwright.sync_api")

UI_WORKFLOW = PACK / "workflows" / "flux_lora.json"
API_WORKFLOW = PACK / "workflows" / "api" / "flux_lora.json"
CHROMIUM_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
CHROMIUM_OPTIONS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]

# What a user would type to make the run small; the same values go into the API prompt.
SMALL = {
    "TesseraPrepareDataset": {"megapixels": 0.06},
    "TesseraTrainLora": {"steps": 3, "compile": "off"},
    "EmptySD3LatentImage": {"width": 128, "height": 128},
    "KSampler": {"steps": 2},
}
ENCODERS = {"clip_name1": "clip_l.safetensors", "clip_name2": "t5xxl_fp16.safetensors"}

READY = "!!(window.app?.graph && window.LiteGraph?.registered_node_types.TesseraTrainLora)"

DROP = """text => {
  const data = new DataTransfer()
  data.items.add(new File([text], 'flux_lora.json', { type: 'application/json' }))
  const at = { dataTransfer: data, bubbles: true, cancelable: true, clientX: 600, clientY: 400 }
  document.querySelector('#graph-canvas').dispatchEvent(new DragEvent('drop', at))
}"""

FAULTS = """() => ({
  overlay: [...document.querySelectorAll('[data-testid=error-overlay], [role=dialog]')].map((e) => e.innerText),
  unknown: app.graph.nodes.filter((n) => !(n.type in LiteGraph.registered_node_types)).map((n) => n.type),
  red_nodes: app.graph.nodes.filter((n) => n.has_errors).map((n) => n.type),
  red_inputs: app.graph.nodes.flatMap((n) => n.inputs.filter((i) => i.hasErrors).map((i) => `${n.type} ${i.name}`)),
  refused: Object.values(app.lastNodeErrors ?? {}),
})"""

USE_TINY_ENCODERS = """names => {
  const old = app.graph.nodes.find((n) => n.type === 'DualCLIPLoader')
  const loader = LiteGraph.createNode('TesseraTinyClipLoader')
  app.graph.add(loader)
  for (const widget of loader.widgets) widget.value = names[widget.name]
  for (const id of [...old.outputs[0].links]) {
    const link = app.graph.links.get(id)
    loader.connect(0, app.graph.getNodeById(link.target_id), link.target_slot)
  }
  app.graph.remove(old)
}"""

SET_WIDGETS = """values => {
  for (const node of app.graph.nodes)
    for (const [name, value] of Object.entries(values[node.type] ?? {})) {
      const widget = node.widgets.find((w) => w.name === name)
      widget.value = value
      widget.callback?.(value)
    }
}"""


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A server on the CPU, whose results repeat bit for bit, with tiny models under the names of the real ones."""
    base = tmp_path_factory.mktemp("browser")
    models, pictures = base / "models", base / "input" / "my_pictures"
    for folder in ("diffusion_models", "text_encoders", "vae", "loras"):
        (models / folder).mkdir(parents=True)
    tiny.write_flux(models / "diffusion_models" / "flux1-dev.safetensors")
    tiny.write_clip_l(models / "text_encoders" / ENCODERS["clip_name1"])
    tiny.write_t5(models / "text_encoders" / ENCODERS["clip_name2"])
    tiny.write_taesd(models / "vae" / "ae.safetensors")
    pictures.mkdir(parents=True)
    for number, size in enumerate([(320, 200), (200, 320), (256, 256), (360, 180)]):
        ramp = Image.linear_gradient("L").rotate(90 * number).resize(size)
        Image.merge("RGB", [ramp, ramp.transpose(Image.Transpose.FLIP_TOP_BOTTOM), ramp]).save(
            pictures / f"{number}.png"
        )
        (pictures / f"{number}.txt").write_text(f"a colour ramp, number {number}\n", encoding="utf-8")
    settings = base / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"Comfy.TutorialCompleted": true}')  # else the frontend greets with its templates
    with ComfyServer(base, find_comfyui(), cpu=True, env={"OMP_NUM_THREADS": "1"}) as server:
        yield server


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser with a profile of its own."""
    if (executable := find_chromium(sys.executable)) is None:
        pytest.skip("There is no Chromium; `python dev.py test` installs it.")
    profile = tmp_path_factory.mktemp("profile")
    with playwright.sync_playwright() as session:
        browser = session.chromium.launch_persistent_context(
            profile, executable_path=executable, args=CHROMIUM_OPTIONS, viewport={"width": 1800, "height": 1000}
        )
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any, comfyui: ComfyServer) -> Iterator[Any]:
    """The frontend, ready, with no more than its own start-up in it."""
    page = chromium.new_page()
    page.crashes = []
    page.on("pageerror", lambda error: page.crashes.append(str(error)))
    page.goto(comfyui.url)
    page.wait_for_function(READY, timeout=60_000)
    page.wait_for_timeout(1000)  # the frontend restores the last session's tabs after its nodes are registered
    yield page
    page.close()


def drop(page: Any, workflow: str) -> None:
    """Drops a file with this text on the canvas and waits until its graph is there, checked for faults."""
    page.evaluate(DROP, workflow)
    page.wait_for_function("app.graph.nodes.some((n) => n.type === 'SaveImage')", timeout=20_000)
    page.wait_for_timeout(2000)  # the search for missing models and nodes follows the loading


def set_use_new_renderer(page: Any, on: bool) -> None:
    page.evaluate("on => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', on)", on)


def small_api_prompt(output_name: str) -> dict[str, Any]:
    prompt = json.loads(API_WORKFLOW.read_text(encoding="utf-8"))
    for node in prompt.values():
        node["inputs"] |= SMALL.get(node["class_type"], {})
        if node["class_type"] == "DualCLIPLoader":
            node |= {"class_type": "TesseraTinyClipLoader", "inputs": dict(ENCODERS)}
        if node["class_type"] == "TesseraTrainLora":
            node["inputs"]["output_name"] = output_name
    return prompt


def queued(page: Any, server: ComfyServer) -> dict[str, Any]:
    """Presses the Run button and returns the history entry of the prompt that it queued."""
    with page.expect_response(lambda reply: reply.url.endswith("/prompt") and reply.request.method == "POST") as answer:
        page.get_by_test_id("queue-button").first.click()
    body = answer.value.json()
    assert answer.value.ok, body
    return server.wait(body["prompt_id"], 120)


def node_of(prompt: dict[str, Any], kind: str) -> str:
    (found,) = (key for key, node in prompt.items() if node["class_type"] == kind)
    return found


def trained_file(server: ComfyServer, entry: dict[str, Any]) -> Path:
    prompt = entry["prompt"][2]
    (summary,) = entry["outputs"][node_of(prompt, "TesseraTrainLora")]["tessera"]
    assert summary["status"] == "finished" and summary["steps_done"] == SMALL["TesseraTrainLora"]["steps"]
    return server.base / "output" / summary["path"]


def test_the_workflow_opens_without_a_missing_node_model_or_red_input(page):
    drop(page, UI_WORKFLOW.read_text(encoding="utf-8"))
    assert page.evaluate(FAULTS) == {"overlay": [], "unknown": [], "red_nodes": [], "red_inputs": [], "refused": []}
    assert page.crashes == []


def test_the_frontend_says_so_where_a_node_or_a_model_of_the_workflow_is_missing(page):
    text = UI_WORKFLOW.read_text(encoding="utf-8")
    drop(
        page,
        text.replace('"TesseraTrainLora"', '"TesseraAbsent"').replace("flux1-dev.safetensors", "absent.safetensors"),
    )
    faults = page.evaluate(FAULTS)
    assert faults["overlay"] and faults["unknown"] == ["TesseraAbsent"]
    assert "TesseraLoadDiffusionModel" in faults["red_nodes"]


def test_the_graph_and_the_api_workflow_are_the_same(page):
    page.evaluate(DROP, UI_WORKFLOW.read_text(encoding="utf-8"))
    page.wait_for_function("app.graph.nodes.some((n) => n.type === 'SaveImage')", timeout=20_000)
    of_graph = page.evaluate("async () => (await app.graphToPrompt()).output")
    assert without_titles(of_graph) == without_titles(json.loads(API_WORKFLOW.read_text(encoding="utf-8")))


def without_titles(prompt: dict[str, Any]) -> dict[str, Any]:
    return {key: {"class_type": node["class_type"], "inputs": node["inputs"]} for key, node in prompt.items()}


@pytest.mark.parametrize("new_renderer", [False, True], ids=["canvas renderer", "new renderer"])
def test_the_run_button_trains_and_the_api_workflow_gives_the_same_lora(page, comfyui, new_renderer):
    name = f"ui_{new_renderer}"
    set_use_new_renderer(page, new_renderer)
    drop(page, UI_WORKFLOW.read_text(encoding="utf-8"))
    page.evaluate(USE_TINY_ENCODERS, ENCODERS)
    values = copy.deepcopy(SMALL)
    values["TesseraTrainLora"]["output_name"] = name
    page.evaluate(SET_WIDGETS, values)
    entry = queued(page, comfyui)
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"]
    faults = page.evaluate(FAULTS)
    assert faults == {"overlay": [], "unknown": [], "red_nodes": [], "red_inputs": [], "refused": []}

    of_graph = trained_file(comfyui, entry)
    pictures = {
        image["filename"] for output in entry["outputs"].values() for image in output.get("images", ())
        if image["type"] == "output" and (comfyui.base / "output" / image["filename"]).is_file()
    }  # fmt: skip
    assert any("_without_" in file for file in pictures) and any("_with_" in file for file in pictures)
    reports = page.locator(".tessera-report")
    playwright.expect(reports.filter(has_text=of_graph.name)).to_be_visible()
    playwright.expect(reports.filter(has_text="Lost to cropping")).to_be_visible()
    live = page.evaluate("app.graph.nodes.find((n) => n.type === 'TesseraTrainLora').tesseraLines")
    assert f"Saved: {of_graph.name}" in live  # told by an event while the run went on
    values = page.evaluate("app.graph.serialize().nodes.find((n) => n.type === 'TesseraTrainLora').widgets_values")
    assert len(values) == len(shared_values("TesseraTrainLora"))  # the report is no value of the workflow
    assert page.crashes == []

    posted = comfyui.run(small_api_prompt(f"api_{new_renderer}"), 120)
    of_api = trained_file(comfyui, posted)
    assert of_api != of_graph
    assert same_tensors(of_graph, of_api)
    saved = comfyui.base / "output" / "loras"
    assert len(list(saved.glob("my_lora_*.safetensors"))) >= 2
    with safe_open(of_graph, framework="pt") as file:
        assert str(comfyui.base) not in json.dumps(file.metadata())


def shared_values(kind: str) -> list[Any]:
    nodes = json.loads(UI_WORKFLOW.read_text(encoding="utf-8"))["nodes"]
    (values,) = (node["widgets_values"] for node in nodes if node["type"] == kind)
    return values


def same_tensors(first: Path, second: Path) -> bool:
    a, b = load_file(first), load_file(second)
    return bool(a) and a.keys() == b.keys() and all(a[key].equal(b[key]) for key in a)

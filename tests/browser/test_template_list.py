"""The pack's workflows in ComfyUI's list of templates and its blueprint, and each of them as the frontend opens it."""

import json

import pytest
from comfy_server import PACK
from PIL import Image

playwright = pytest.importorskip("playwright.sync_api")

NAMES = sorted(path.stem for path in (PACK / "workflows").glob("*.json"))
LEAST_ZOOM = 0.58
SCREEN = {"width": 1920, "height": 1200}
TITLES = json.loads((PACK / "locales" / "en" / "main.json").read_text(encoding="utf-8"))["templateWorkflows"]
OPEN = "app.extensionManager.command.execute('Comfy.BrowseTemplates')"


def test_every_workflow_has_a_title_with_its_number_a_description_and_a_card():
    for kind in ("template", "templateDescription"):
        for folder in TITLES[kind].values():
            assert sorted(folder) == NAMES
    titles = TITLES["template"]["tessera"].values()
    assert sorted(int(title.split()[0]) for title in titles) == list(range(1, len(NAMES) + 1))
    for name in NAMES:
        with Image.open(PACK / "workflows" / f"{name}.jpg", formats=["JPEG"]) as card:
            assert card.size == (1280, 720)


def test_the_list_of_templates_shows_titles_in_their_order(frontend):
    frontend.page.set_viewport_size(SCREEN)
    frontend.page.evaluate(OPEN)
    frontend.page.get_by_text("Tessera: LoRA training").first.click()
    titles = sorted(TITLES["template"]["tessera"].values(), key=lambda title: int(title.split()[0]))
    playwright.expect(frontend.page.get_by_text(titles[0], exact=True)).to_be_visible()
    shown = frontend.page.locator("[data-testid^='template-workflow-'] h3").all_inner_texts()
    assert shown[:6] == titles[:6]
    playwright.expect(frontend.page.get_by_text(TITLES["templateDescription"]["tessera"]["flux_lora"])).to_be_visible()
    assert frontend.crashes == []


def test_each_workflow_opens_legible_and_without_a_node_on_another(frontend):
    frontend.page.set_viewport_size(SCREEN)
    for name in NAMES:
        frontend.drop((PACK / "workflows" / f"{name}.json").read_text(encoding="utf-8"))
        assert frontend.page.evaluate("app.canvas.ds.scale") >= LEAST_ZOOM, name
        assert frontend.faults() == {}, name
    assert frontend.crashes == []


BLUEPRINT = "Train a LoRA"
INPUTS = ["model", "clip", "vae", "folder", "name", "trigger_word", "steps"]
# As with a blueprint from the list, next to the loaders; made small inside, for a computer without a GPU.
USE_BLUEPRINT = """async ([blueprint, encoders, small]) => {
  await app.loadGraphData(blueprint)
  const [node] = app.graph.nodes
  for (const { type, widgets } of node.subgraph.nodes)
    for (const [name, value] of Object.entries(small[type] ?? {})) widgets.find((w) => w.name === name).value = value
  const values = { unet_name: 'flux1-dev.safetensors', vae_name: 'ae.safetensors', ...encoders }
  for (const [slot, type] of ['UNETLoader', 'TesseraTinyClipLoader', 'VAELoader'].entries()) {
    const loader = LiteGraph.createNode(type)
    app.graph.add(loader)
    loader.pos = [-400, 200 * slot]
    for (const widget of loader.widgets) widget.value = values[widget.name] ?? widget.value
    loader.connect(0, node, slot)
  }
  for (const [name, value] of Object.entries({ folder: 'input/dots', name: 'blue', trigger_word: 'a dot', steps: 2 }))
    node.widgets.find((w) => w.name === name).value = value
}"""
SMALL = {
    "TesseraPrepareDataset": {"megapixels": 0.01},
    "TesseraPreview": {"width": 64, "height": 64, "steps": 1},
    "TesseraTrainLora": {"compile": "off"},
}


def test_the_blueprint_is_listed_and_fits_the_nodes(comfyui):
    listed = {entry["name"]: (key, entry) for key, entry in comfyui.get("/global_subgraphs").items()}
    key, entry = listed[BLUEPRINT]
    assert entry["source"] == "custom_node"
    blueprint = json.loads(comfyui.get(f"/global_subgraphs/{key}")["data"])
    (outer,), (inside,) = blueprint["nodes"], blueprint["definitions"]["subgraphs"]
    assert outer["type"] == inside["id"] and outer["title"] == inside["name"] == BLUEPRINT
    assert [one["name"] for one in outer["inputs"]] == [one["name"] for one in inside["inputs"]] == INPUTS
    assert [(one["name"], one["type"]) for one in inside["outputs"]] == [("lora", "LORA_MODEL"), ("picture", "IMAGE")]
    known = comfyui.get("/object_info")
    nodes = {one["id"]: one for one in inside["nodes"]}
    for one in nodes.values():
        of_it = known[one["type"]]
        names = {name for part in ("required", "optional") for name in of_it["input"].get(part, {})}
        assert {slot["name"] for slot in one["inputs"]} <= names, one["type"]
        assert [slot["type"] for slot in one["outputs"]] == of_it["output"], one["type"]
    for link in inside["links"]:
        if link["origin_id"] in nodes and link["target_id"] in nodes:
            source = nodes[link["origin_id"]]["outputs"][link["origin_slot"]]
            assert source["type"] == nodes[link["target_id"]]["inputs"][link["target_slot"]]["type"] == link["type"]


def test_the_blueprint_trains_and_shows_a_picture(frontend, comfyui):
    (folder := comfyui.base / "input" / "dots").mkdir(exist_ok=True)
    Image.new("RGB", (96, 96), "navy").save(folder / "dot.png")
    (folder / "dot.txt").write_text("on white")
    blueprint = json.loads((PACK / "subgraphs" / f"{BLUEPRINT}.json").read_text(encoding="utf-8"))
    frontend.page.evaluate(USE_BLUEPRINT, [blueprint, frontend.ENCODERS, SMALL])
    assert frontend.faults() == {}
    prompt, entry = frontend.run()
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    key, train = next((key, one["inputs"]) for key, one in prompt.items() if one["class_type"] == "TesseraTrainLora")
    assert (train["steps"], train["output_name"]) == (2, "blue")
    (texts,) = [one["inputs"]["text"] for one in prompt.values() if one["class_type"] == "CLIPTextEncode"]
    assert prompt[texts[0]]["inputs"]["value"] == "a dot"
    run = entry["outputs"][key]["tessera"][0]
    assert run["steps_done"] == 2 and run["previews"]["files"] and entry["outputs"][key]["images"]
    assert frontend.crashes == []

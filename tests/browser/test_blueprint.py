"""The pack's subgraph blueprint: ComfyUI lists it, its node trains, and what it does is told on that node."""

import json
import os

import pytest
from PIL import Image
from tiny.live_page import panel_says

playwright = pytest.importorskip("playwright.sync_api")

RENDERERS = pytest.mark.parametrize("new_renderer", [False, True], ids=["canvas renderer", "new renderer"])

BLUEPRINT = "Train a LoRA"
INPUTS = ["model", "clip", "vae", "folder", "name", "trigger_word", "steps"]
OUTER = "app.graph.nodes.find((n) => n.subgraph)"
# Next to loaders, and made small inside, for a computer without a GPU.
WIRE = f"""([encoders, small, values]) => {{
  const node = {OUTER}
  for (const {{ type, widgets }} of node.subgraph.nodes)
    for (const [name, value] of Object.entries(small[type] ?? {{}})) widgets.find((w) => w.name === name).value = value
  const files = {{ unet_name: 'flux1-dev.safetensors', vae_name: 'ae.safetensors', ...encoders }}
  for (const [slot, type] of ['UNETLoader', 'TesseraTinyClipLoader', 'VAELoader'].entries()) {{
    const loader = LiteGraph.createNode(type)
    app.graph.add(loader)
    loader.pos = [node.pos[0] - 400, node.pos[1] + 200 * slot]
    for (const widget of loader.widgets) widget.value = files[widget.name] ?? widget.value
    loader.connect(0, node, slot)
  }}
  for (const [name, value] of Object.entries(values)) node.widgets.find((w) => w.name === name).value = value
}}"""
VALUES = f"""() => {{
  const widgets = {OUTER}.widgets.filter((w) => w.name !== 'tessera_report')
  return Object.fromEntries(widgets.map((w) => [w.name, w.value]))
}}"""
SMALL = {
    "TesseraPrepareDataset": {"megapixels": 0.01},
    "TesseraPreview": {"width": 64, "height": 64, "steps": 1},
    "TesseraTrainLora": {"compile": "off"},
}


def picture(page, name):
    if folder := os.environ.get("TESSERA_LOOK"):
        page.screenshot(path=f"{folder}/{name}.png")


def add_from_search(frontend):
    """As a person does: a double click on the canvas, the name, Enter."""
    page = frontend.page
    page.evaluate("app.graph.clear()")
    page.mouse.dblclick(900, 500)
    page.keyboard.type(BLUEPRINT)
    page.wait_for_timeout(700)  # the search waits for the end of typing
    picture(page, "search")
    page.keyboard.press("Enter")
    playwright.expect(page.get_by_role("dialog")).to_have_count(0)
    page.mouse.click(900, 500)  # puts down what hangs on the pointer
    page.wait_for_function(f"!!({OUTER})")


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


@RENDERERS
def test_it_is_added_trains_and_tells_on_its_own_node_how_far_it_is(frontend, comfyui, new_renderer):
    (folder := comfyui.base / "input" / "dots").mkdir(exist_ok=True)
    Image.new("RGB", (96, 96), "navy").save(folder / "dot.png")
    (folder / "dot.txt").write_text("on white")
    frontend.use_new_renderer(new_renderer)
    page = frontend.page
    name = "new_blue" if new_renderer else "old_blue"
    add_from_search(frontend)
    values = {"folder": "input/dots", "name": name, "trigger_word": "a dot", "steps": 2}
    page.evaluate(WIRE, [frontend.ENCODERS, SMALL, values])
    assert page.evaluate(VALUES) == values and frontend.faults() == {}
    before = page.evaluate(f"{OUTER}.serialize()")
    prompt, entry = frontend.run()
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    key, train = next((key, one["inputs"]) for key, one in prompt.items() if one["class_type"] == "TesseraTrainLora")
    assert (train["steps"], train["output_name"]) == (2, name)
    (texts,) = [one["inputs"]["text"] for one in prompt.values() if one["class_type"] == "CLIPTextEncode"]
    assert prompt[texts[0]]["inputs"]["value"] == "a dot"
    run = entry["outputs"][key]["tessera"][0]
    assert run["steps_done"] == 2 and run["previews"]["files"] and entry["outputs"][key]["images"]

    panel_says(frontend, "Done in 0:")
    picture(page, name)
    after = page.evaluate(f"{OUTER}.serialize()")
    assert {**after, "size": before["size"]} == before
    page.get_by_role("button", name="Continue + 2").click()
    panel_says(frontend, "Step 4 / 4")
    assert page.evaluate(VALUES)["steps"] == 4
    assert frontend.crashes == []

"""The pack's subgraph blueprint: ComfyUI lists it, its node trains, and what it does is told on that node."""

import json
import os

import pytest
from PIL import Image
from renderers import renderers
from tiny.nodes.live_page import panel_says

playwright = pytest.importorskip("playwright.sync_api")


BLUEPRINT = "Train a LoRA"
INPUTS = ["model", "clip", "vae", "folder", "name", "trigger_word", "preset", "steps"]
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
# Nothing draws a node that is out of view, or a graph that has not changed.
IS_DRAWN = f"""name => {{
  app.canvas.centerOnNode({OUTER})
  app.canvas.draw(true, true)
  return ({OUTER}.widgets.find((w) => w.name === name).y ?? 0) > 0
}}"""
WIDGET_PLACE = f"""name => {{
  const widget = {OUTER}.widgets.find((w) => w.name === name)
  const [x, y] = [{OUTER}.pos[0] + {OUTER}.size[0] / 2, {OUTER}.pos[1] + widget.y + 10]
  const {{ left, top }} = app.canvas.canvas.getBoundingClientRect()
  const [shownX, shownY] = app.canvas.ds.convertOffsetToCanvas([x, y])
  return [left + shownX, top + shownY]
}}"""
INSIDE = f"""() => {{
  const train = {OUTER}.subgraph.nodes.find((n) => n.type === 'TesseraTrainLora')
  const names = ['learning_rate', 'rank', 'gradient_accumulation']
  return names.map((name) => train.widgets.find((w) => w.name === name).value)
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


def put_down(page, attempt):
    """Click until the node no longer hangs on the pointer."""
    position = f"JSON.stringify({OUTER}?.pos ?? null)"
    for _ in range(4):
        page.mouse.click(900, 500)
        page.wait_for_timeout(500 * attempt)
        previous = page.evaluate(position)
        page.mouse.move(800, 420, steps=3)
        page.wait_for_timeout(300 * attempt)
        if page.evaluate(position) == previous:
            return
        page.mouse.move(900, 500, steps=3)


def add_from_search(frontend):
    """As a person does: a double click on the canvas, the name, Enter; once more where a busy page was not ready."""
    page = frontend.page
    page.evaluate("app.graph.clear()")
    for attempt in range(1, 6):
        page.mouse.dblclick(900, 500)
        page.wait_for_timeout(300 * attempt)
        if page.evaluate("document.activeElement?.tagName === 'INPUT'"):
            page.keyboard.type(BLUEPRINT)
            page.wait_for_timeout(700 * attempt)  # the search waits for the end of typing
            picture(page, "search")
            page.keyboard.press("Enter")
            page.wait_for_timeout(300 * attempt)
            put_down(page, attempt)
            if page.evaluate(f"app.graph.nodes.length === 1 && !!({OUTER})"):
                playwright.expect(page.get_by_role("dialog")).to_have_count(0)
                return
        page.keyboard.press("Escape")
        page.evaluate("app.graph.clear()")
    raise AssertionError("The blueprint can't be added.")


def test_the_blueprint_is_listed_and_fits_the_nodes(comfyui):
    listed = {entry["name"]: (key, entry) for key, entry in comfyui.get("/global_subgraphs").items()}
    key, entry = listed[BLUEPRINT]
    assert entry["source"] == "custom_node"
    blueprint = json.loads(comfyui.get(f"/global_subgraphs/{key}")["data"])
    (outer,), (inside,) = blueprint["nodes"], blueprint["definitions"]["subgraphs"]
    assert outer["type"] == inside["id"] and outer["title"] == inside["name"] == BLUEPRINT
    assert [item["name"] for item in outer["inputs"]] == [item["name"] for item in inside["inputs"]] == INPUTS
    assert [(item["name"], item["type"]) for item in inside["outputs"]] == [
        ("lora", "LORA_MODEL"),
        ("picture", "IMAGE"),
    ]
    object_info = comfyui.get("/object_info")
    nodes = {item["id"]: item for item in inside["nodes"]}
    for item in nodes.values():
        definition = object_info[item["type"]]
        names = {name for part in ("required", "optional") for name in definition["input"].get(part, {})}
        assert {slot["name"] for slot in item["inputs"]} <= names, item["type"]
        assert [slot["type"] for slot in item["outputs"]] == definition["output"], item["type"]
    for link in inside["links"]:
        if link["origin_id"] in nodes and link["target_id"] in nodes:
            source = nodes[link["origin_id"]]["outputs"][link["origin_slot"]]
            assert source["type"] == nodes[link["target_id"]]["inputs"][link["target_slot"]]["type"] == link["type"]


@renderers("new renderer")
def test_the_blueprint_is_added_trains_and_shows_its_progress_on_its_node(frontend, comfyui, new_renderer):
    (folder := comfyui.base / "input" / "dots").mkdir(exist_ok=True)
    Image.new("RGB", (96, 96), "navy").save(folder / "dot.png")
    (folder / "dot.txt").write_text("on white")
    (other := comfyui.base / "input" / "other dots").mkdir(exist_ok=True)
    Image.new("RGB", (96, 96), "black").save(other / "dot.png")
    (other / "dot.txt").write_text("on black")
    frontend.use_new_renderer(new_renderer)
    page = frontend.page
    name = "new_blue" if new_renderer else "old_blue"
    add_from_search(frontend)
    values = {"folder": "input/dots", "name": name, "trigger_word": "a dot", "preset": "custom", "steps": 2}
    page.evaluate(WIRE, [frontend.ENCODERS, SMALL, values])
    assert page.evaluate(VALUES) == values and frontend.faults() == {}
    original = page.evaluate(f"{OUTER}.serialize()")
    prompt, entry = frontend.run()
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    key, train = next((key, node["inputs"]) for key, node in prompt.items() if node["class_type"] == "TesseraTrainLora")
    assert (train["steps"], train["output_name"]) == (2, name)
    (texts,) = [node["inputs"]["text"] for node in prompt.values() if node["class_type"] == "CLIPTextEncode"]
    assert prompt[texts[0]]["inputs"]["value"] == "a dot"
    run = entry["outputs"][key]["tessera"][0]
    assert run["steps_done"] == 2 and run["previews"]["files"] and entry["outputs"][key]["images"]

    panel_says(frontend, "Done in 0:")
    frontend.picture("blueprint", page.evaluate(f"{OUTER}.type"))
    after = page.evaluate(f"{OUTER}.serialize()")
    assert {**after, "size": original["size"]} == original
    page.get_by_role("button", name="Continue + 2").click()
    panel_says(frontend, "Step 4 / 4")
    assert page.evaluate(VALUES)["steps"] == 4

    page.evaluate(f"app.canvas.setGraph({OUTER}.subgraph)")
    playwright.expect(page.locator(".tessera-tile")).to_have_text("on white")  # of the folder chosen outside
    page.evaluate("app.canvas.setGraph(app.rootGraph)")
    page.evaluate(f"{OUTER}.widgets.find((w) => w.name === 'folder').value = 'input/other dots'")
    page.evaluate(f"app.canvas.setGraph({OUTER}.subgraph)")
    playwright.expect(page.locator(".tessera-tile")).to_have_text("on black")
    assert frontend.crashes == []


@renderers("canvas renderer")
def test_an_absent_folder_is_marked_on_it_when_it_is_opened_until_another_is_chosen(frontend, comfyui, new_renderer):
    (folder := comfyui.base / "input" / "squares").mkdir(exist_ok=True)
    Image.new("RGB", (96, 96), "navy").save(folder / "square.png")
    frontend.use_new_renderer(new_renderer)
    page = frontend.page
    add_from_search(frontend)
    page.evaluate(WIRE, [frontend.ENCODERS, {}, {"folder": "input/absent", "name": "of no run"}])
    page.evaluate("async () => app.loadGraphData(app.graph.serialize())")
    error = page.locator(".tessera-error:visible")  # newer frontends draw those inside too, hidden
    playwright.expect(error).to_contain_text("No pictures in input/absent yet: drop them on this node")
    page.evaluate(f"{OUTER}.widgets.find((w) => w.name === 'folder').value = 'input/squares'")
    playwright.expect(error).to_have_count(0)
    page.wait_for_timeout(1500)  # each second it looks again
    error_count = f"[{OUTER}, ...{OUTER}.subgraph.nodes].filter((n) => n.tessera?.error).length"
    assert page.evaluate(error_count) == 0 and frontend.crashes == []


def choose(frontend, name, option, new_renderer):
    """Choose an option as a person does: a click on the input, a click on the option."""
    page = frontend.page
    if new_renderer:
        page.get_by_role("combobox", name=name).click()
        page.get_by_role("option", name=option, exact=True).click()
        return
    page.wait_for_function(IS_DRAWN, arg=name)
    page.mouse.click(*page.evaluate(WIDGET_PLACE, name))
    page.locator(".litemenu-entry").get_by_text(option, exact=True).click()


@renderers("new renderer")
def test_a_preset_chosen_on_it_fills_in_what_suits_the_model_in_front(frontend, new_renderer):
    frontend.use_new_renderer(new_renderer)
    page = frontend.page
    add_from_search(frontend)
    page.evaluate(WIRE, [{"unet_name": "qwen_image_fp8_e4m3fn.safetensors"}, {}, {}])
    hint = page.locator(".tessera-hint:visible")
    choose(frontend, "preset", "style, quick", new_renderer)
    playwright.expect(hint).to_contain_text("style, quick, for Qwen-Image")
    assert page.evaluate(VALUES)["steps"] == 1000 and page.evaluate(INSIDE) == [5e-5, 16, 2]
    choose(frontend, "preset", "object, best", new_renderer)
    text = "object, best, for Qwen-Image: steps 1500, rank 16, gradient_accumulation 1, learning_rate 0.00005."
    playwright.expect(hint).to_have_text(text)
    assert page.evaluate(VALUES)["steps"] == 1500 and page.evaluate(INSIDE) == [5e-5, 16, 1]
    picture(page, f"preset_{'new' if new_renderer else 'old'}")
    page.evaluate("async () => app.loadGraphData(app.graph.serialize())")
    playwright.expect(hint).to_have_text(text)
    page.wait_for_timeout(500)  # two looks at the new nodes, which change nothing
    page.evaluate(f"{OUTER}.widgets.find((w) => w.name === 'steps').value = 1499")
    playwright.expect(hint).to_have_count(0)
    assert page.evaluate(VALUES)["preset"] == "custom" and page.evaluate(VALUES)["steps"] == 1499
    choose(frontend, "preset", "motion, quick", new_renderer)
    playwright.expect(hint).to_contain_text("Qwen-Image makes pictures")
    assert page.evaluate(VALUES)["preset"] == "custom" and page.evaluate(VALUES)["steps"] == 1499
    assert frontend.crashes == []

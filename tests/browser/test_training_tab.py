"""The sidebar tab Training in ComfyUI's own frontend: all runs, their curves, workflows and LoRAs, and deletion."""

import json
import math
import os
import re
import shutil

import pytest
from PIL import Image
from renderers import renderers
from tiny.nodes.live_page import open_graph, press_run, redraw, with_previews
from tiny.nodes.server_runs import paused_at

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

HOSTILE = "<img src=x onerror='window.hostile = 1'>"
ROWS = "[...document.querySelectorAll('.tessera-runs-row')]"


def picture(page, name):
    if folder := os.environ.get("TESSERA_LOOK"):
        page.screenshot(path=f"{folder}/{name}.png")


def write_run(root, place, steps, total_steps, status="finished", level=0.5, model="flux1-dev.safetensors", **facts):
    """A run as Train LoRA writes it, with a preview."""
    folder = root / place
    name = folder.name.rpartition(" (")[0]
    (folder / "previews").mkdir(parents=True)
    facts = {"output_name": f"animals/{name}", "model": model, "steps": total_steps, **facts}
    (folder / "run.json").write_text(json.dumps(facts))
    lines = [{"kind": "start"}, {"kind": "begin", "step": 0, "loss": [], "validation": []}]
    for step in range(1, steps + 1):
        loss = level * (1 + math.exp(-step / total_steps * 4)) + 0.2 * level * math.sin(step * step)
        lines.append({"kind": "step", "step": step, "loss": loss, "rate": 1e-4})
    if steps:
        lines.append({"kind": "preview", "step": steps})
    if status:
        lines.append({"kind": "end", "status": status, "step": steps, "text": HOSTILE, "seconds": 9})
    (folder / "progress.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if steps:
        sky, ground = Image.new("RGB", (64, 64), (120, 170, 210)), (int(250 * level), 120, 60)
        sky.paste(ground, (0, 64 - steps // 8, 64, 64))
        sky.save(folder / "previews" / f"step{steps:06d}_0.png")
        shot = {"step": steps, "row": 0, "title": HOSTILE, "settings": {}, "frames": 1}
        (folder / "previews" / "previews.json").write_text(json.dumps([shot]))
    if status == "finished":
        (folder / f"{name}.safetensors").write_bytes(b"lora")
    return folder


@pytest.fixture
def runs(comfyui):
    """Five runs of different ends."""
    root = comfyui.base / "output" / "loras" / "animals"
    fox = write_run(root, "red fox (001)", 300, 300, level=0.4)
    (fox / "red fox.workflow.json").write_text(json.dumps(made_by()))
    write_run(root, "red fox (002)", 120, 300, status="cancelled", level=0.6)
    write_run(root, "wolf (001)", 200, 200, level=0.3, model="Chroma1-HD.safetensors")
    write_run(root, "owl (001)", 40, 100, status="", level=0.8, model=HOSTILE)
    write_run(root, "none (001)", 0, 100, status="failed")
    for index, place in enumerate(["none (001)", "owl (001)", "wolf (001)", "red fox (002)", "red fox (001)"]):
        for file in ("run.json", "progress.jsonl"):
            os.utime(root / place / file, (1.795e9 + 8e4 * index, 1.795e9 + 8e4 * index))
    yield root
    shutil.rmtree(root)
    shutil.rmtree(comfyui.base / "output" / ".tessera-trash", ignore_errors=True)


def made_by():
    """A workflow of one note."""
    note = {"id": 1, "type": "Note", "pos": [0, 0], "size": [200, 100], "flags": {}, "order": 0, "mode": 0}
    note |= {"properties": {}, "widgets_values": ["this made the fox"]}
    return {
        "last_node_id": 1,
        "last_link_id": 0,
        "nodes": [note],
        "links": [],
        "groups": [],
        "config": {},
        "version": 0.4,
    }


def open_tab(frontend, filter=""):
    page = frontend.page
    if not page.locator(".tessera-runs").count():
        page.evaluate("app.extensionManager.sidebarTab.toggleSidebarTab('tessera.training')")
    page.get_by_role("searchbox", name="Filter by name or model").fill(filter)
    return page.locator(".tessera-runs")


def row(tab, name):
    return tab.locator(".tessera-runs-row").filter(has_text=name)


def names(page):
    return page.evaluate(f"{ROWS}.map((row) => row.querySelector('label').innerText.trim())")


def drag(page, source, x, y):
    """Drags with the mouse, as a person does."""
    box = source.bounding_box()
    page.mouse.move(box["x"] + 90, box["y"] + 16)
    page.mouse.down()
    page.mouse.move(box["x"] + 120, box["y"] + 30, steps=3)
    page.mouse.move(x, y, steps=5)
    page.mouse.move(x + 1, y)
    page.mouse.up()


LOADERS = """() => app.graph.nodes.filter((node) => node.type === 'LoraLoaderModelOnly').map((node) => ({
  at: app.canvasPosToClientPos([node.pos[0], node.pos[1] - LiteGraph.NODE_TITLE_HEIGHT]),
  lora: node.widgets.find((widget) => widget.name === 'lora_name').value,
}))"""

DROP_RUN = """id => {
  const data = new DataTransfer()
  data.setData('application/x-tessera-run', id)
  const at = { dataTransfer: data, bubbles: true, cancelable: true, clientX: 900, clientY: 400 }
  document.querySelector('#graph-canvas').dispatchEvent(new DragEvent('drop', at))
}"""

# The next question that ends so waits until `window.goOn` is called.
HOLD = """ending => {
  const { api } = app
  window.held = false
  api.fetchApi = async (path, ...more) => {
    if (path.endsWith(ending)) {
      delete api.fetchApi
      window.held = true
      await new Promise((goOn) => (window.goOn = goOn))
    }
    return api.fetchApi(path, ...more)
  }
}"""


@renderers("new renderer")
def test_runs_are_listed_filtered_compared_opened_added_and_deleted(frontend, comfyui, runs, new_renderer):
    frontend.use_new_renderer(new_renderer)
    page = frontend.page
    tab = open_tab(frontend)
    expect(tab.locator(".tessera-runs-row").first).to_be_visible()
    page.wait_for_function(
        f"count => {ROWS}.length === Math.min(200, count)", arg=comfyui.get("/tessera/runs")["count"]
    )
    tab = open_tab(frontend, "animals/")
    expect(tab).to_contain_text("5 runs")
    assert names(page) == [
        f"animals/{name}" for name in ("red fox (001)", "red fox (002)", "wolf (001)", "owl (001)", "none (001)")
    ]
    for name, state in [
        ("red fox (001)", "Finished, 300 steps"), ("red fox (002)", "Stopped at step 120 of 300"),
        ("owl (001)", "Broke off at step 40 of 100"), ("none (001)", "Ended by an error at step 0 of 100"),
    ]:  # fmt: skip
        expect(row(tab, name)).to_contain_text(state)
    expect(row(tab, "owl")).to_contain_text(HOSTILE)
    title = "`[title='${name}'] svg path`"  # noqa: RUF027 - JavaScript's own
    points = f"name => document.querySelector({title}).getAttribute('d').split('L').length"
    assert (
        50 < page.evaluate(points, "animals/red fox (001)") <= 60 and page.evaluate(points, "animals/owl (001)") == 40
    )
    expect(row(tab, "red fox (001)").get_by_alt_text("Last preview, step 300")).to_be_visible()
    page.wait_for_function(
        "[...document.querySelectorAll('.tessera-runs img')].every((i) => i.complete && i.naturalWidth)"
    )
    picture(page, f"listed_{new_renderer}")

    for name in ("red fox (001)", "red fox (002)", "wolf (001)"):
        row(tab, name).get_by_role("checkbox").check()
    chart = tab.locator(".tessera-runs-chart")
    page.wait_for_function("document.querySelectorAll('.tessera-runs-chart path[d^=M]').length === 3")
    lengths = (
        "[...document.querySelectorAll('.tessera-runs-chart path')].map((p) => p.getAttribute('d').split('L').length)"
    )
    assert page.evaluate(lengths) == [300, 120, 200]
    colours = page.evaluate("[...document.querySelectorAll('.tessera-runs-chart path')].map((p) => p.style.stroke)")
    assert len(set(colours)) == 3
    picture(page, f"compared_{new_renderer}")
    open_tab(frontend, "animals/ safetensors")
    expect(tab).to_contain_text("4 runs")
    frontend.picture("training_tab", locator=tab, themes=("dark", "light"))
    open_tab(frontend, "fox animals")
    expect(tab).to_contain_text("2 runs")
    assert names(page) == ["animals/red fox (001)", "animals/red fox (002)"]
    assert page.evaluate(lengths) == [300, 120, 200]  # what is drawn stays
    chart.get_by_role("button", name="Clear: animals/red fox (001)").click()
    assert page.evaluate(lengths) == [120, 200]
    expect(row(tab, "red fox (001)").get_by_role("checkbox")).not_to_be_checked()
    chart.get_by_role("button", name="Clear", exact=True).click()
    expect(chart).to_be_hidden()
    open_tab(frontend, "no such run")
    expect(tab).to_contain_text("No run has “no such run” in its name or model.")
    open_tab(frontend, "animals/")
    expect(tab).to_contain_text("5 runs")

    page.evaluate("app.graph.clear()")
    drag(page, row(tab, "red fox (001)"), 1000, 420)
    expect(tab).to_contain_text("is in the graph")
    (loader,) = page.evaluate(LOADERS)
    assert loader["lora"] == os.path.join("animals", "red fox (001)", "red fox.safetensors")
    assert loader["at"] == pytest.approx([1001, 420], abs=2)
    listed = comfyui.get("/object_info/LoraLoaderModelOnly")["LoraLoaderModelOnly"]["input"]["required"]
    assert loader["lora"] in listed["lora_name"][0] and frontend.faults() == {}
    picture(page, f"dropped_{new_renderer}")
    page.evaluate("document.querySelector('#graph-canvas').focus()")
    page.keyboard.press("Control+z")
    page.wait_for_function(f"({LOADERS})().length === 0")
    page.wait_for_timeout(500)
    expect(tab).to_contain_text("5 runs")  # the filter is not undone with it
    page.evaluate("app.graph.clear()")
    drag(page, row(tab, "red fox (001)"), 1000, 420)
    page.wait_for_function(f"({LOADERS})().length === 1")
    row(tab, "wolf (001)").get_by_role("button", name="Add LoRA").click()
    page.wait_for_function(f"({LOADERS})().length === 2")
    expect(row(tab, "none (001)").get_by_role("button", name="Add LoRA")).to_be_disabled()
    drag(page, row(tab, "none (001)"), 1000, 600)
    assert len(page.evaluate(LOADERS)) == 2
    fox = row(tab, "red fox (001)").get_attribute("data-run")
    open_tab(frontend, "wolf animals")
    expect(tab).to_contain_text("1 run")
    expect(row(tab, "red fox")).to_have_count(0)
    wolf = row(tab, "wolf (001)").get_attribute("data-run")
    urls = []
    page.on("request", lambda request: urls.append(request.url))
    for id in ("../../evil", fox, wolf):  # another page's drag may name anything; only what is listed is asked for
        page.evaluate(DROP_RUN, id)
    page.wait_for_function(f"({LOADERS})().some((loader) => loader.lora.includes('wolf') && loader.at[1] > 390)")
    assert [url.rpartition("/")[2] for url in urls if url.endswith("points=3")] == [f"{wolf}?points=3"]
    open_tab(frontend, "animals/")
    expect(tab).to_contain_text("5 runs")

    open_count = page.evaluate("app.extensionManager.workflow.openWorkflows.length")
    row(tab, "red fox (001)").get_by_role("button", name="Open workflow").click()
    page.wait_for_function(
        "app.graph.nodes.length === 1 && app.graph.nodes[0].widgets[0].value === 'this made the fox'"
    )
    page.wait_for_function(
        "n => app.extensionManager.workflow.openWorkflows.length === n", arg=open_count + 1
    )  # none is lost
    page.wait_for_function("app.extensionManager.workflow.activeWorkflow.filename === 'red fox (001)'")
    row(tab, "owl (001)").get_by_role("button", name="Open workflow").click()
    expect(tab).to_contain_text("This run has no workflow")
    picture(page, f"refused_{new_renderer}")

    files = sorted(runs.rglob("*"))
    for name in ("wolf (001)", "owl (001)"):
        row(tab, name).get_by_role("button", name="Delete").click()
        expect(tab).to_contain_text(f"animals/{name} is deleted.")
        expect(row(tab, name)).to_have_count(0)
    assert not (runs / "wolf (001)").exists() and not (runs / "owl (001)").exists()
    picture(page, f"deleted_{new_renderer}")
    for name in ("owl (001)", "wolf (001)"):
        tab.get_by_role("button", name="Undo").click()
        expect(tab).to_contain_text(f"animals/{name} is back.")
        expect(row(tab, name)).to_have_count(1)
    assert sorted(runs.rglob("*")) == files
    expect(tab.get_by_role("button", name="Undo")).to_have_count(0)
    trash = tab.locator(".tessera-runs-trash")
    expect(trash).to_be_hidden()

    row(tab, "red fox (001)").focus()
    graph = page.evaluate("app.graph.nodes.length")
    page.evaluate("app.canvas.selectNode(app.graph.nodes[0])")
    for key in ("ArrowDown", "ArrowDown", "Delete"):
        page.keyboard.press(key)
    assert page.evaluate(
        "document.activeElement.dataset.run === document.querySelectorAll('.tessera-runs-row')[2].dataset.run"
    )
    assert page.evaluate("app.graph.nodes.length") == graph
    for name in ("Draw the loss of animals/wolf (001)", "Open workflow", "Report", "Add LoRA", "Delete"):
        page.keyboard.press("Tab")
        assert name in page.evaluate(
            "document.activeElement.getAttribute('aria-label') || document.activeElement.innerText"
        )
    assert not page.evaluate("window.hostile") and frontend.crashes == []
    page.evaluate("app.extensionManager.sidebarTab.toggleSidebarTab('tessera.training')")
    expect(tab).to_have_count(0)


def test_the_report_of_a_run_opens_alone_or_beside_another_and_the_run_goes_on_from_it(frontend, comfyui, runs):
    page = frontend.page
    open_graph(frontend, with_previews(frontend.ENCODERS, "animals/red fox", steps=300))
    (runs / "red fox (001)" / "red fox.workflow.json").write_text(json.dumps(page.evaluate("app.graph.serialize()")))
    facts = json.loads((runs / "red fox (001)" / "run.json").read_text())
    (runs / "red fox (001)" / "run.json").write_text(json.dumps(facts | {"can_go_on": True}))
    page.evaluate("app.graph.clear()")
    tab = open_tab(frontend, "animals/")
    fox = row(tab, "red fox (001)")

    def open_report():
        fox.get_by_role("button", name="Report").click()
        dialog = page.get_by_role("dialog", name="Report")
        expect(dialog.frame_locator("iframe").get_by_role("heading", name="red fox (001)")).to_be_visible()
        return dialog

    expect(fox).to_contain_text("Finished, 300 steps")
    dialog = open_report()
    frame = dialog.frame_locator("iframe")
    expect(frame.get_by_text("Finished after 300 steps.")).to_be_visible()
    expect(frame.get_by_alt_text("Loss by step")).to_be_visible()
    picture(page, "report")
    frontend.picture("run_report", locator=dialog)
    assert page.evaluate("window.hostile === undefined && document.querySelector('iframe').sandbox.length === 0")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    open_report().get_by_role("button", name="Use in this workflow").click()
    expect(tab).to_contain_text("red fox.safetensors is in the graph.")
    assert [loader["lora"] for loader in page.evaluate(LOADERS)] == ["animals/red fox (001)/red fox.safetensors"]
    open_report().get_by_role("button", name="Compare saves").click()
    page.wait_for_function("app.graph.nodes.some((node) => node.type === 'TesseraCompareLoras')")
    answer = {"prompt_id": "1", "number": 1, "node_errors": {}}
    page.route("**/prompt", lambda route: route.fulfill(json=answer))  # what it would train on isn't the fox
    with page.expect_request("**/prompt") as request:
        open_report().get_by_role("button", name="Continue").click()
    prompt = request.value.post_data_json["prompt"]
    (train,) = (node for node in prompt.values() if node["class_type"] == "TesseraTrainLora")
    assert train["inputs"]["steps"] == 600
    expect(tab).to_contain_text("Queued, up to step 600.")
    page.unroute("**/prompt")
    for name in ("red fox (001)", "red fox (002)"):
        row(tab, name).get_by_role("checkbox").check()
    tab.get_by_role("button", name="Side by side").click()
    frame = page.get_by_role("dialog", name="Report").frame_locator("iframe")
    for name in ("red fox (001)", "red fox (002)"):
        expect(frame.get_by_role("heading", name=name, exact=True)).to_be_visible()
    picture(page, "side_by_side")
    page.get_by_role("dialog", name="Report").get_by_role("button", name="Close").click()
    tab.get_by_role("button", name="Clear", exact=True).click()


def test_a_run_in_training_grows_and_cannot_be_deleted(frontend, comfyui):
    page = frontend.page
    open_graph(frontend, with_previews(frontend.ENCODERS, "tab_live"))
    tab = open_tab(frontend, "tab_live")
    expect(tab).to_contain_text("No run has")
    with paused_at(comfyui, 6):
        prompt_id = press_run(frontend)
        expect(row(tab, "tab_live (001)")).to_contain_text("Training, step 6 of 12")
        row(tab, "tab_live (001)").get_by_role("checkbox").check()
        expect(row(tab, "tab_live (001)").get_by_role("button", name="Delete")).to_be_disabled()
        expect(row(tab, "tab_live (001)").get_by_role("img", name="Loss up to step 6")).to_be_visible()
        picture(page, "tab_running")
    comfyui.wait(prompt_id)
    expect(row(tab, "tab_live (001)")).to_contain_text("Finished, 12 steps")
    page.wait_for_function(
        "document.querySelector('.tessera-runs-chart path').getAttribute('d').split('L').length === 12"
    )
    expect(row(tab, "tab_live (001)").get_by_role("button", name="Delete")).to_be_enabled()
    page.evaluate("app.graph.clear()")
    row(tab, "tab_live (001)").get_by_role("button", name="Open workflow").click()
    page.wait_for_function("app.graph.nodes.some((node) => node.type === 'TesseraTrainLora')")
    panel = page.locator(".tessera-run")  # of the node, which goes with its run
    expect(panel).to_contain_text("Finished")
    row(tab, "tab_live (001)").get_by_role("button", name="Delete").click()
    expect(panel).to_have_count(0)
    tab.get_by_role("button", name="Undo").click()
    expect(panel).to_contain_text("Finished")
    row(tab, "tab_live (001)").get_by_role("button", name="Delete").click()
    expect(tab).to_contain_text("tab_live (001) is deleted")
    shutil.rmtree(comfyui.base / "output" / ".tessera-trash")
    tab.get_by_role("button", name="Undo").click()
    expect(tab).to_contain_text("The files of this run are not in output/.tessera-trash any more.")
    assert frontend.crashes == []


def test_many_runs_come_in_pages_and_the_page_is_readable_in_light(frontend, comfyui, runs):
    page = frontend.page
    for number in range(3, 206):
        folder = runs / f"red fox ({number:03d})"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"output_name": "animals/red fox", "steps": 10}))
        os.utime(folder / "run.json", (1e9, 1e9))
    page.evaluate("app.extensionManager.setting.set('Comfy.ColorPalette', 'light')")
    try:
        tab = open_tab(frontend, "animals/ fox")
        expect(tab).to_contain_text("205 runs")
        page.wait_for_function(f"{ROWS}.length === 200")
        for name in ("red fox (001)", "red fox (002)"):
            row(tab, name).get_by_role("checkbox").check()
        page.wait_for_function("document.querySelectorAll('.tessera-runs-chart path[d^=M]').length === 2")
        picture(page, "tab_light")
        requests = page.evaluate(f"{ROWS}.filter((row) => row.detail).length")
        assert 0 < requests < 60  # those that are seen
        tab.get_by_role("button", name="Show 5 more").click()
        page.wait_for_function(f"{ROWS}.length === 205")
        assert len(set(names(page))) == 205
        requests = []
        page.on("request", lambda request: requests.append(request.url))
        page.evaluate(HOLD, "fox&page=0")
        redraw(page)
        page.wait_for_function("window.held")
        open_tab(frontend, "animals/ wolf")
        expect(tab).to_contain_text("1 run")
        page.evaluate("window.goOn()")
        page.wait_for_timeout(500)
        assert any("fox&page=0" in url for url in requests) and not any("page=1" in url for url in requests)
    finally:
        page.evaluate("app.extensionManager.setting.set('Comfy.ColorPalette', 'dark')")
    assert frontend.crashes == []


def test_keys_of_the_tab_do_not_reach_the_graph_and_deletions_come_back_independently(frontend, comfyui, runs):
    page, trash = frontend.page, comfyui.base / "output" / ".tessera-trash"
    page.evaluate(
        """() => {
          app.graph.clear()
          app.graph.add(LiteGraph.createNode('Note'))
          app.canvas.selectNode(app.graph.nodes[0])
        }"""
    )
    tab = open_tab(frontend, "animals/")
    expect(tab).to_contain_text("5 runs")

    def press(button):
        button.focus()
        page.keyboard.press("Enter")

    def focus_is_kept():
        page.wait_for_timeout(100)  # a browser takes it from what is not drawn any more
        for key in ("Delete", "Backspace"):
            page.keyboard.press(key)
        assert page.evaluate("Boolean(document.activeElement.closest('.tessera-runs'))")
        assert page.evaluate("app.graph.nodes.length") == 1

    order = ["animals/red fox (002)", "animals/wolf (001)", "animals/owl (001)", "animals/none (001)"]
    for name, following in zip(order, [*order[1:], "animals/red fox (001)"], strict=True):
        press(row(tab, name).get_by_role("button", name="Delete"))
        expect(row(tab, name)).to_have_count(0)
        focus_is_kept()
        assert page.evaluate("document.activeElement.title") == following
    hide, undo = (tab.get_by_role("button", name=name) for name in ("Hide this", "Undo"))
    press(hide)  # that of the run which is shown
    expect(tab).to_contain_text("animals/owl (001) is deleted.")
    focus_is_kept()
    shutil.rmtree(next(trash.glob("*/animals/owl (001)")))
    press(undo)
    expect(tab).to_contain_text("The files of this run are not in output/.tessera-trash any more.")
    expect(tab).to_contain_text("animals/wolf (001) is deleted.")
    focus_is_kept()
    (runs / "wolf (001)").mkdir()
    (runs / "wolf (001)" / "run.json").write_text("{}")
    press(undo)
    expect(tab).to_contain_text("wolf (001) is the folder of another run by now")
    shutil.rmtree(runs / "wolf (001)")
    page.evaluate(HOLD, "/restore")
    press(undo)
    page.wait_for_function("window.held")
    page.keyboard.press("Enter")  # once more, to no effect
    press(row(tab, "red fox (001)").get_by_role("button", name="Delete"))
    expect(tab).to_contain_text("animals/red fox (001) is deleted.")
    page.evaluate("window.goOn()")
    expect(tab).to_contain_text("animals/wolf (001) is back.")
    for name in ("red fox (001)", "red fox (002)"):
        expect(tab).to_contain_text(f"animals/{name} is deleted.")
        press(undo)
        expect(tab).to_contain_text(f"animals/{name} is back.")
        focus_is_kept()
    expect(undo).to_have_count(0)
    expect(tab).to_contain_text("3 runs")

    row(tab, "wolf (001)").get_by_role("checkbox").check()
    press(tab.locator(".tessera-runs-chart").get_by_role("button", name="Clear: animals/wolf (001)"))
    expect(tab.locator(".tessera-runs-chart")).to_be_hidden()
    focus_is_kept()
    assert frontend.crashes == []


def test_deleted_runs_are_brought_back_after_a_reload_and_removed_for_good(frontend, comfyui, runs):
    page = frontend.page
    tab = open_tab(frontend, "animals/")
    expect(tab).to_contain_text("5 runs")
    for name in ("wolf (001)", "owl (001)"):
        row(tab, name).get_by_role("button", name="Delete").click()
        expect(tab).to_contain_text(f"animals/{name} is deleted.")
    frontend.open()  # what a page knew is gone
    tab = open_tab(frontend, "animals/")
    expect(tab).to_contain_text("3 runs")
    expect(tab.get_by_role("button", name="Undo")).to_have_count(0)
    trash = tab.locator(".tessera-runs-trash")
    expect(trash).to_contain_text(re.compile(r"Deleted: 2, \d\.\d MB"))
    trash.locator("summary").click()
    expect(trash).to_contain_text(re.compile(r"animals/owl \(001\) · \d{4}-\d\d-\d\d · \d\.\d MB"))
    picture(page, "trash")
    trash.get_by_role("button", name="Bring back: animals/wolf (001)").click()
    expect(tab).to_contain_text("animals/wolf (001) is back.")
    expect(row(tab, "wolf (001)")).to_have_count(1)
    expect(trash).to_contain_text("Deleted: 1,")
    files = sorted(runs.rglob("*"))
    dialog = page.get_by_role("dialog")
    trash.get_by_role("button", name="Remove for good").click()
    expect(dialog).to_contain_text("There is no way back.")
    picture(page, "trash_sure")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_be_hidden()
    assert list((comfyui.base / "output" / ".tessera-trash").rglob("owl (001)"))
    trash.get_by_role("button", name="Remove for good").click()
    dialog.get_by_role("button", name="Delete").click()
    expect(tab).to_contain_text("Removed for good: 1.")
    expect(trash).to_be_hidden()
    assert not (comfyui.base / "output" / ".tessera-trash").exists() and sorted(runs.rglob("*")) == files
    page.keyboard.press("Delete")
    assert page.evaluate("Boolean(document.activeElement.closest('.tessera-runs'))") and frontend.crashes == []


def test_a_tab_that_is_closed_while_a_filter_is_typed_asks_no_more(frontend, runs):
    tab = open_tab(frontend, "animals/")
    expect(tab).to_contain_text("5 runs")
    open_tab(frontend, "animals/wolf")
    frontend.page.evaluate("app.extensionManager.sidebarTab.toggleSidebarTab('tessera.training')")
    expect(tab).to_have_count(0)
    frontend.page.wait_for_timeout(500)
    assert frontend.crashes == []
    expect(open_tab(frontend, "animals/wolf")).to_contain_text("1 run")


def test_sentences_of_the_tab_are_announced_and_a_server_that_came_back_is_not_called_away(frontend, runs):
    page = frontend.page
    if page.locator(".tessera-runs").count():
        page.evaluate("app.extensionManager.sidebarTab.toggleSidebarTab('tessera.training')")
        expect(page.locator(".tessera-runs")).to_have_count(0)
    tab = open_tab(frontend, "animals/")
    expect(tab).to_contain_text("5 runs")

    def load():
        with page.expect_response("**/tessera/deleting"):
            redraw(page)
        page.wait_for_timeout(100)

    page.context.set_offline(True)
    try:
        redraw(page)
        expect(tab).to_contain_text("The server does not answer.")
    finally:
        page.context.set_offline(False)
    load()
    expect(tab).not_to_contain_text("The server does not answer.")
    heights = [place.bounding_box()["height"] for place in tab.get_by_role("status").all()]
    assert heights == [0, 0]  # there while they are empty, or else a screen reader may not tell what comes
    row(tab, "owl (001)").get_by_role("button", name="Open workflow").click()
    expect(tab).to_contain_text("This run has no workflow")
    load()
    expect(tab).to_contain_text("This run has no workflow")  # which is not of the list
    assert frontend.crashes == []


def test_a_paused_run_goes_on_and_trainings_in_line_change_places(frontend, comfyui):
    """After a restart of the server the prompt beside the LoRA is queued; while it trains, Pause ends it."""
    prompt = {"image": {"class_type": "EmptyImage", "inputs": {"width": 16, "height": 16, "batch_size": 1, "color": 0}}}
    prompt["shown"] = {"class_type": "PreviewImage", "inputs": {"images": ["image", 0]}}
    root = comfyui.base / "output" / "loras" / "resting"
    owl = write_run(root, "owl (001)", 40, 100, status="paused", prompt_id="before the restart")
    (owl / "owl.api.json").write_text(json.dumps(prompt))
    (owl / "owl.workflow.json").write_text(json.dumps(made_by()))
    line = [{"prompt_id": "a", "names": ["first"]}, {"prompt_id": "b", "names": ["second"]}]
    page, orders = frontend.page, []

    def answer(route):
        if route.request.method == "POST":
            orders.append(route.request.post_data_json["order"])
            line.reverse()
        route.fulfill(json={"line": line})

    page.route("**/tessera/line", answer)
    try:
        tab = open_tab(frontend, "resting")
        expect(row(tab, "owl")).to_contain_text("Paused at step 40 of 100")
        expect(row(tab, "owl").get_by_role("button", name="Pause", exact=True)).to_be_hidden()
        expect(tab.locator(".tessera-line-row")).to_contain_text(["first", "second"])
        tab.locator(".tessera-line-row").get_by_role("button", name="Earlier").click()
        expect(tab.locator(".tessera-line-row")).to_contain_text(["second", "first"])
        assert orders == [["b", "a"]]
        with page.expect_response(lambda reply: reply.url.endswith("/prompt")) as queued:
            row(tab, "owl").get_by_role("button", name="Go on").click()
        expect(tab).to_contain_text("owl (001) is in the queue.")
        assert comfyui.wait(queued.value.json()["prompt_id"])["prompt"][2].keys() == prompt.keys()
    finally:
        page.unroute("**/tessera/line")
        shutil.rmtree(root)

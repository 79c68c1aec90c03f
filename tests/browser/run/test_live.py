"""Train LoRA while it trains, in ComfyUI's own frontend: the panel with its curve, and errors on their nodes."""

import base64
import json
import re
import shutil

import pytest
from PIL import Image
from renderers import renderers
from tiny.nodes.live_page import center, open_graph, panel_says, press_run, redraw
from tiny.nodes.prompt import node
from tiny.nodes.server_runs import paused_at

playwright = pytest.importorskip("playwright.sync_api")


def graph(encoders, name, **changes):
    train = {"output_name": name, "steps": 60, "learning_rate": 1e-3, "rank": 4, "batch_size": 1, "seed": 0}
    train |= {"gradient_accumulation": 1, "compile": "off", "save_every": 5, "resume": "latest"}
    return {
        "1": node("UNETLoader", unet_name="flux1-dev.safetensors", weight_dtype="default"),
        "2": node("TesseraTinyClipLoader", **encoders),
        "3": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "4": node("CLIPTextEncode", clip=["2", 0], text="a fox"),
        "5": node("TesseraLatentsToDataset", latents=["3", 0], positive=["4", 0], max_graphs=1),
        "6": node("TesseraTrainLora", model=["1", 0], data=["5", 0], **{**train, **changes}),
    }


def points(frontend):
    """Number of points of the curve, and the step that it is at."""
    return frontend.page.locator(".tessera-run svg").get_attribute("aria-label")


def loss_text(page, loss):
    return page.evaluate("loss => loss.toPrecision(3)", loss)


CURVES = "[...document.querySelectorAll('.tessera-run path')].map((p) => p.getAttribute('d'))"
# What the frontend does with a picture that is dropped on the graph.
DROP_PICTURE = """text => {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))
  return app.handleFile(new File([bytes], 'report.png', { type: 'image/png' }))
}"""
# Before the panel has looked for a run of the name.
PRESS_RENAMED = """button => {
  const node = app.graph.nodes.find((n) => n.type === 'TesseraTrainLora')
  const name = node.widgets.find((w) => w.name === 'output_name')
  const was = name.value
  name.value = 'another'
  button.click()
  name.value = was
}"""
VALUES = "app.graph.serialize().nodes.find((n) => n.type === 'TesseraTrainLora').widgets_values"


PROGRESS_TEXTS = """app.graph.nodes.flatMap((n) => n.widgets ?? [])
  .filter((w) => w.name === '$$node-text-preview').length"""
CUT_OFF = """() => {
  const panel = document.querySelector('.tessera-run').getBoundingClientRect()
  const inside = (r) =>
    !r.width || (r.left >= panel.left && r.right <= panel.right + 1 && r.bottom <= panel.bottom + 1)
  return [...document.querySelectorAll('.tessera-run button, .tessera-run span')]
    .filter((e) => !inside(e.getBoundingClientRect())).map((e) => e.textContent)
}"""


@renderers("new renderer")  # two minutes each
def test_the_curve_grows_is_there_after_a_reload_and_cancel_says_what_it_saved(frontend, comfyui, new_renderer):
    name = "red_fox" if new_renderer else "grey_fox"
    frontend.use_new_renderer(new_renderer)
    prompt = graph(frontend.ENCODERS, name)
    open_graph(frontend, prompt)
    page = frontend.page
    workflow = frontend.prompt()
    values = frontend.page.evaluate(VALUES)
    with paused_at(comfyui, 23):
        prompt_id = press_run(frontend)
        panel_says(frontend, "Step 23 / 60")
        assert points(frontend) == "Loss of 23 points up to step 23"
        curves = page.evaluate(CURVES)
        saves, loss, mean, _ = curves
        assert saves.count("M") == 4 and loss.count("L") == mean.count("L") == 22
        panel_says(frontend, " left")  # the time
        playwright.expect(page.get_by_role("button", name="Save now")).to_be_enabled()
        playwright.expect(page.get_by_role("button", name="Sample now")).to_be_disabled()  # no Training Preview
        page.reload()
        frontend.open()
        open_graph(frontend, prompt)
        panel_says(frontend, "Step 23 / 60")
        assert page.evaluate(CURVES) == curves
        assert (
            frontend.prompt() == workflow and page.evaluate(VALUES) == values
        )  # the panel is no value of the workflow
        center(page)
        page.get_by_role("button", name="Cancel", exact=True).click()  # ComfyUI's own knows of no prompt now
        panel_says(frontend, "Ends and saves.")
    comfyui.wait(prompt_id)
    panel_says(frontend, "and saved; Run goes on from there.")
    button = page.get_by_role("button", name="Stop and keep")
    playwright.expect(button).to_be_hidden()  # nothing trains
    with paused_at(comfyui, 40):
        press_run(frontend)
        panel_says(frontend, "Step 40 / 60")
        center(page)
        assert page.evaluate(CUT_OFF) == []
        frontend.picture("train_lora", "TesseraTrainLora", themes=("light", "dark"))
        center(page)
        button.click()
        panel_says(frontend, "Stop and keep: after this step.")
        playwright.expect(button).to_be_disabled()
    panel_says(frontend, "Stopped and kept")
    panel_says(frontend, "and saved; Run goes on from there.")
    press_run(frontend)
    panel_says(frontend, "Finished")
    assert points(frontend) == "Loss of 60 points up to step 60"

    run = comfyui.get(f"/tessera/runs/{comfyui.get(f'/tessera/runs?name={name}')['runs'][0]['id']}")
    first, last = (sum(p[1] for p in part) / 3 for part in (run["loss"][:3], run["loss"][-3:]))
    card = page.locator(".tessera-run", has_text=re.compile(r"Done in 0:\d\d:\d\d, loss from "))
    playwright.expect(card).to_contain_text(f"loss from {loss_text(page, first)} to {loss_text(page, last)}")
    playwright.expect(page.locator(".tessera-report")).to_contain_text("Saved: output/")
    text = page.locator(".tessera-report").inner_text()
    assert text.count("loss ") == 2, text  # in the legend, and in the sentence at the end
    assert page.evaluate(PROGRESS_TEXTS) == 0  # of ComfyUI, which would go on saying Training
    playwright.expect(button).to_be_hidden()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy LoRA name").click()
    panel_says(frontend, f"Copied: {run['lora']}")
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')) }")
    page.get_by_role("button", name="Copy LoRA name").click()  # as on a page without https
    panel_says(frontend, f"The name is {run['lora']}")
    assert page.evaluate("navigator.clipboard.readText()") == run["lora"]
    continuation = page.get_by_role("button", name="Continue + 60")
    playwright.expect(continuation).to_be_visible()
    assert page.evaluate(CUT_OFF) == []
    frontend.set_widgets({"TesseraTrainLora": {"resume": "off"}})  # it would begin anew
    redraw(page)
    playwright.expect(continuation).to_be_hidden()
    frontend.set_widgets({"TesseraTrainLora": {"resume": "latest"}})
    redraw(page)
    frontend.set_widgets({"TesseraLatentsToDataset": {"max_graphs": 0}})  # the server refuses it
    continuation.click()
    panel_says(frontend, "steps is 120 now, but not all of the workflow was queued; press Run.")
    page.keyboard.press("Escape")
    frontend.set_widgets({"TesseraLatentsToDataset": {"max_graphs": 1}, "TesseraTrainLora": {"steps": 60}})
    redraw(page)
    continuation.evaluate(PRESS_RENAMED)
    panel_says(frontend, "The inputs of this node have changed; press Run.")
    continuation.click()
    panel_says(frontend, "Done, steps 61 to 120 in 0:")
    assert points(frontend) == "Loss of 120 points up to step 120"
    assert frontend.prompt()["6"]["inputs"]["steps"] == 120
    continuation = page.get_by_role("button", name="Continue + 60")  # the steps that were asked for at first, again
    playwright.expect(continuation).to_be_visible()
    for source, is_known in [(node("StringLength", string="x" * 120), False), (node("PrimitiveInt", value=120), True)]:
        open_graph(frontend, graph(frontend.ENCODERS, name, steps=["8", 0]) | {"8": source})
        panel_says(frontend, "Done, steps 61 to 120 in 0:")
        playwright.expect(continuation).to_be_visible(visible=is_known)
    picture = (comfyui.base / "output" / "loras" / run["lora"]).parent / "report.png"
    page.evaluate("app.graph.clear()")
    page.evaluate(DROP_PICTURE, base64.b64encode(picture.read_bytes()).decode())
    page.wait_for_function("app.graph.nodes.some((node) => node.type === 'TesseraTrainLora')")
    (train,) = (entry["inputs"] for entry in frontend.prompt().values() if entry["class_type"] == "TesseraTrainLora")
    assert (train["output_name"], train["steps"]) == (name, 60)  # those of that run
    assert frontend.faults() == {} and frontend.crashes == []


def test_a_run_of_another_client_grows_on_every_page_that_is_open(frontend, comfyui):
    """Its events go to the client that queued it, so the page asks."""
    prompt = graph(frontend.ENCODERS, "queued_elsewhere", steps=12)
    open_graph(frontend, prompt)
    with paused_at(comfyui, 5):
        prompt_id = comfyui.queue(prompt, client_id="another")
        panel_says(frontend, "Step 5 / 12")
        hold = comfyui.base / "hold"
        hold.with_name("hold.new").write_text("9")
        hold.with_name("hold.new").replace(hold)
        panel_says(frontend, "Step 9 / 12")
        assert points(frontend) == "Loss of 9 points up to step 9"
    comfyui.wait(prompt_id)
    panel_says(frontend, "Finished")
    assert frontend.crashes == []


def test_a_page_that_stays_open_learns_that_its_run_was_killed_with_the_server(frontend, comfyui):
    prompt = graph(frontend.ENCODERS, "killed", save_every=2)
    open_graph(frontend, prompt)
    try:
        with paused_at(comfyui, 6):
            press_run(frontend)
            panel_says(frontend, "Step 6 / 60")
            comfyui.kill()
            comfyui.start_again()
            panel_says(frontend, "Broke off")
        panel_says(frontend, "Step 6 / 60")
        assert points(frontend) == "Loss of 6 points up to step 6"
        playwright.expect(frontend.page.get_by_role("button", name="Stop and keep")).to_be_hidden()
    finally:
        if comfyui.process is None:
            comfyui.start_again()
    assert frontend.crashes == []


def test_a_run_that_goes_on_from_an_earlier_state_is_drawn_anew(frontend, comfyui):
    folder = comfyui.base / "output" / "loras" / "drawn (001)"
    folder.mkdir(parents=True)

    def write_lines(started, *lines):
        (folder / "run.json").write_text(json.dumps({"output_name": "drawn", "steps": 20, "started": started}))
        with open(folder / "progress.jsonl", "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def steps(*numbers, loss):
        return [{"kind": "step", "step": step, "loss": loss * step, "rate": 1e-4} for step in numbers]

    checks = [{"kind": "validation", "step": step, "loss": 0.5} for step in (0, 5)]
    write_lines("first", *steps(*range(1, 11), loss=1.0), *checks, {"kind": "saved", "step": 4, "file": "a"})
    open_graph(frontend, graph(frontend.ENCODERS, "drawn"))
    panel_says(frontend, "Step 10 / 20")
    assert points(frontend) == "Loss of 10 points up to step 10"
    saves, loss, mean, validation = frontend.page.evaluate(CURVES)
    assert (saves.count("M"), loss.count("L"), mean.count("L"), validation.count("M")) == (1, 9, 9, 2)
    first = [1.0, 2.0, 3.0, 4.0]
    begin = {"kind": "begin", "step": 4, "loss": first, "validation": [[0, 0.5]]}
    write_lines("second", {"kind": "start"}, begin, *steps(*range(5, 13), loss=2.0))  # past what was seen
    redraw(frontend.page)
    panel_says(frontend, "Step 12 / 20")
    assert points(frontend) == "Loss of 12 points up to step 12"
    curves = frontend.page.evaluate(CURVES)
    open_graph(frontend, graph(frontend.ENCODERS, "drawn"))  # as a page that was opened after it
    panel_says(frontend, "Step 12 / 20")
    assert frontend.page.evaluate(CURVES) == curves and curves[3].count("M") == 1
    assert frontend.crashes == []


ON_NODES = """() => Object.fromEntries(app.graph.nodes.filter((n) => n.tessera?.error)
  .map((n) => [n.type, n.widgets.find((w) => w.name === 'tessera_report').element.querySelector('[role=alert]')
  .textContent]))"""


@renderers("canvas renderer")
def test_faults_stand_in_red_on_their_node_until_they_are_mended(frontend, comfyui, new_renderer):
    frontend.use_new_renderer(new_renderer)
    page = frontend.page
    prompt = graph(frontend.ENCODERS, "..")
    prompt["7"] = node("TesseraImageFolder", folder="input/absent")
    open_graph(frontend, prompt)
    page.evaluate("async () => { await app.loadGraphData(app.graph.serialize()) }")
    absent = "No pictures in input/absent yet: drop them on this node, or choose another folder."
    page.wait_for_function(f"Object.keys(({ON_NODES})()).length === 1")
    assert page.evaluate(ON_NODES) == {"TesseraImageFolder": absent}  # marked when it is opened

    comfyui.wait(press_run(frontend))
    page.wait_for_function(f"'TesseraTrainLora' in ({ON_NODES})()")
    sentence = page.evaluate(ON_NODES)["TesseraTrainLora"]
    assert sentence.startswith("output_name is '..'; use a plain name")
    alert = page.locator(".tessera-error", has_text="output_name is")
    playwright.expect(alert).to_be_visible()
    red, green, blue = map(int, alert.evaluate("e => getComputedStyle(e).color.match(/\\d+/g).slice(0, 3)"))
    assert red > 2 * green and red > 2 * blue
    page.keyboard.press("Escape")
    frontend.picture("error", "TesseraTrainLora")

    state = "mended (001)/state-000005.tessera"
    page.keyboard.press("Escape")
    frontend.set_widgets({"TesseraTrainLora": {"output_name": "mended", "resume": state, "steps": 1}})
    assert press_run(frontend) is None  # the server refuses it
    page.wait_for_function("app.graph.nodes.some((n) => n.tessera?.error?.startsWith('resume: there is no state'))")
    assert page.evaluate(ON_NODES)["TesseraTrainLora"] == (
        f"resume: there is no state '{state}' any more; choose another, 'latest' or 'off'."
    )

    (comfyui.base / "input" / "there").mkdir(exist_ok=True)
    frontend.set_widgets({"TesseraTrainLora": {"resume": "latest"}})
    listed = page.evaluate("app.graph.nodes.find((n) => n.type === 'TesseraImageFolder').widgets[0].options.values")
    folder = next(iter(listed))
    frontend.set_widgets({"TesseraImageFolder": {"folder": folder}})
    empty = folder == "input/my_pictures" and not any((comfyui.base / folder).iterdir())
    assert ("TesseraImageFolder" in page.evaluate(ON_NODES)) == empty
    comfyui.wait(press_run(frontend))
    page.wait_for_function(f"!('TesseraTrainLora' in ({ON_NODES})())")
    assert frontend.crashes == []


def test_a_folder_too_deep_for_the_list_is_not_called_absent(frontend, comfyui):
    (folder := comfyui.base / "input" / "deep" / "2" / "3" / "4" / "5" / "6" / "7").mkdir(parents=True)
    Image.new("RGB", (64, 64), "teal").save(folder / "there.png")
    open_graph(
        frontend,
        {
            "1": node("TesseraImageFolder", folder=folder.relative_to(comfyui.base).as_posix()),
            "2": node("TesseraImageFolder", folder="input/absent"),
        },
    )
    page, marked = frontend.page, "app.graph.nodes.filter((n) => n.tessera?.error).map((n) => n.widgets[0].value)"
    page.evaluate("async () => { await app.loadGraphData(app.graph.serialize()) }")
    playwright.expect(page.locator(".tessera-error")).to_have_count(1)
    page.wait_for_timeout(1500)  # each second it looks again
    assert page.evaluate(marked) == ["input/absent"] and frontend.crashes == []


def test_words_of_a_stranger_in_a_run_are_text_on_the_page(frontend, comfyui):
    hostile = "<img src=x onerror='window.hostile = 1'>"
    folder = comfyui.base / "output" / "loras" / "hostile (001)"
    folder.mkdir(parents=True)
    lines = [
        {"kind": "step", "step": 1, "loss": 1.0, "rate": 1e-4},
        {"kind": "end", "status": "failed", "text": hostile},
    ]
    (folder / "run.json").write_text(json.dumps({"output_name": hostile, "model": hostile, "steps": 1}))
    (folder / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    open_graph(frontend, graph(frontend.ENCODERS, "hostile"))
    panel_says(frontend, "Ended by an error")
    with open(folder / "progress.jsonl", "a") as file:
        file.write(json.dumps({"kind": "end", "status": "constructor", "text": hostile}) + "\n")
    redraw(frontend.page)
    panel_says(frontend, "Broke off")
    with open(folder / "progress.jsonl", "a") as file:
        file.write(json.dumps(lines[-1]) + "\n")
    redraw(frontend.page)
    panel_says(frontend, "Ended by an error")
    page = frontend.page
    page.evaluate(TELL, {"kind": "note", "node": "6", "text": hostile})
    report = page.locator(".tessera-report", has_text=hostile)
    playwright.expect(report.locator(".tessera-error")).to_have_text(hostile)
    assert report.inner_text().count(hostile) == 2 and report.locator("img").count() == 0
    assert page.evaluate("window.hostile") is None and frontend.crashes == []
    error = "app.graph.nodes.find((n) => n.type === 'TesseraTrainLora').tessera?.error"
    assert page.evaluate(error) == hostile
    shutil.rmtree(folder)
    page.evaluate("window.dispatchEvent(new Event('tessera.runs.changed'))")  # as the tab tells of a deletion
    page.wait_for_function(f"!{error}")

    said = "An error of another workflow's node 6."
    for kind in ("TesseraPrepareDataset", "TesseraTrainLora"):
        detail = {"node_id": "6", "node_type": kind, "exception_message": said}
        page.evaluate("detail => app.api.dispatchEvent(new CustomEvent('execution_error', { detail }))", detail)
        assert (page.evaluate(error) == said) == (kind == "TesseraTrainLora")


ACTIVE = "name => app.extensionManager.workflow.activeWorkflow.path.endsWith(name)"


def test_events_of_a_workflow_reach_no_node_of_another_that_was_opened_meanwhile(frontend, comfyui):
    """Its nodes have the same numbers and kinds."""
    page = frontend.page
    open_graph(frontend, graph(frontend.ENCODERS, "of_the_first", steps=8, save_every=2))
    page.wait_for_function(ACTIVE, arg="live.json")
    with paused_at(comfyui, 3):
        prompt_id = press_run(frontend)
        panel_says(frontend, "Step 3 / 8")
        page.evaluate("prompt => app.loadApiJson(prompt, 'other')", graph(frontend.ENCODERS, "of_the_other"))
        page.wait_for_function(ACTIVE, arg="other.json")
    comfyui.wait(prompt_id)
    # An error that the server tells before the run's end would be here by then.
    page.wait_for_function("() => app.extensionManager.workflow && !document.querySelector('.tessera-run')")
    page.wait_for_timeout(1000)
    said = "Of the first."
    tell = "detail => app.api.dispatchEvent(new CustomEvent('execution_error', { detail }))"
    detail = {"node_id": "6", "node_type": "TesseraTrainLora", "exception_message": said}
    page.evaluate(tell, detail | {"prompt_id": prompt_id})
    assert page.locator(".tessera-report").all_text_contents() == []
    page.evaluate(tell, detail | {"prompt_id": "queued before this page was opened"})
    assert page.locator(".tessera-report").inner_text() == said
    assert frontend.crashes == []


def test_a_page_that_was_reloaded_still_knows_which_workflow_it_queued(frontend, comfyui):
    """The workflows are opened again, as the frontend does where it is set to; the nodes have the same numbers."""
    page = frontend.page
    first = graph(frontend.ENCODERS, "of_the_reloaded", steps=8, save_every=2)
    open_graph(frontend, first)
    page.wait_for_function(ACTIVE, arg="live.json")
    with paused_at(comfyui, 3):
        prompt_id = press_run(frontend)
        panel_says(frontend, "Step 3 / 8")
        frontend.open()
        open_graph(frontend, first)
        page.wait_for_function(ACTIVE, arg="live.json")
        page.evaluate("prompt => app.loadApiJson(prompt, 'other')", graph(frontend.ENCODERS, "of_the_other"))
        page.wait_for_function(ACTIVE, arg="other.json")
        listener = (
            "window.heard = []; app.api.addEventListener('tessera.train', ({ detail }) => heard.push(detail.kind))"
        )
        page.evaluate(listener)
    comfyui.wait(prompt_id)
    page.wait_for_function("window.heard.includes('end')")  # the notes and saves before it have come too
    page.wait_for_timeout(500)
    assert page.locator(".tessera-report").all_text_contents() == []
    assert frontend.crashes == []


def held_back(page, pattern):
    """The list of the questions to addresses of `pattern`, which wait for `continue_`."""
    routes = []
    page.route(pattern, lambda route: routes.append(route))
    return routes


def wait_for(page, routes):
    for _ in range(200):
        if not routes:
            page.wait_for_timeout(50)
    assert routes


def test_an_answer_that_comes_late_draws_nothing_for_a_workflow_that_is_gone(frontend, comfyui):
    folder = comfyui.base / "output" / "loras" / "late (001)"
    folder.mkdir(parents=True)
    pattern = re.compile(r"/tessera/runs/.+\?since=")
    (folder / "run.json").write_text(json.dumps({"output_name": "late", "model": "FLUX", "steps": 1}))
    (folder / "progress.jsonl").write_text('{"kind": "step", "step": 1, "loss": 1.0, "rate": 1e-4}\n')
    page = frontend.page
    routes = held_back(page, pattern)
    open_graph(frontend, graph(frontend.ENCODERS, "late"))
    wait_for(page, routes)
    open_graph(frontend, graph(frontend.ENCODERS, "of_the_other"))
    for route in routes:
        route.continue_()
    page.unroute(pattern)
    page.wait_for_timeout(500)
    assert page.locator(".tessera-report").all_text_contents() == []
    assert frontend.crashes == []
    shutil.rmtree(folder)


def test_the_notes_of_a_run_are_there_after_a_reload_and_go_with_it(frontend, comfyui):
    folder = comfyui.base / "output" / "loras" / "noted (001)"
    folder.mkdir(parents=True)
    lines = [{"kind": "step", "step": 1, "loss": 1.0, "rate": 1e-4}, {"kind": "note", "text": "First."}]
    (folder / "run.json").write_text(json.dumps({"output_name": "noted", "model": "FLUX", "steps": 1}))
    (folder / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    open_graph(frontend, graph(frontend.ENCODERS, "noted"))
    page = frontend.page
    notes = page.locator(".tessera-report")
    playwright.expect(notes).to_contain_text("First.")
    with open(folder / "progress.jsonl", "a") as file:
        file.write(json.dumps({"kind": "note", "text": "Second."}) + "\n")
    redraw(page)
    playwright.expect(notes).to_contain_text("First.\nSecond.")
    saved = {"kind": "saved", "node": "6", "file": "noted-step000001.safetensors"}  # of the client that was reloaded
    page.evaluate(TELL, saved)
    playwright.expect(notes).to_contain_text("First.\nSecond.\nSaved: noted-step000001.safetensors")
    open_graph(frontend, graph(frontend.ENCODERS, "noted"))
    playwright.expect(notes).to_contain_text("Second.")
    pattern = re.compile(r"/tessera/runs/.+\?since=")
    routes = held_back(page, pattern)
    redraw(page)
    wait_for(page, routes)
    shutil.rmtree(folder)
    redraw(page)  # while the first question is on its way, whose answer will be that there is no such run
    for route in routes:
        route.continue_()
    page.unroute(pattern)
    playwright.expect(notes).to_have_count(0)
    assert frontend.crashes == []


IN_SUBGRAPH = """said => {
  const train = app.graph.nodes.find((n) => n.type === 'TesseraTrainLora')
  const { subgraph, node: outer } = app.graph.convertToSubgraph(new Set([train]))
  const [inner] = subgraph.nodes
  const detail = { node_id: `${outer.id}:${inner.id}`, node_type: inner.type, exception_message: said }
  app.api.dispatchEvent(new CustomEvent('execution_error', { detail }))
  const report = (node) => node.widgets.find((w) => w.name === 'tessera_report')?.element
  return [outer, inner].map((node) => report(node)?.querySelector('[role=alert]').textContent)
}"""


def test_an_error_in_a_subgraph_stands_on_the_node_around_it_too_until_run_is_pressed(frontend):
    open_graph(frontend, graph(frontend.ENCODERS, "of no run"))
    page, said = frontend.page, "An error in a subgraph."
    assert page.evaluate(IN_SUBGRAPH, said) == [said, said]
    page.evaluate("app.graph.nodes.find((n) => n.type === 'TesseraLatentsToDataset').widgets[0].value = 0")
    assert press_run(frontend) is None  # the server refuses it, for another node
    error = "app.graph.nodes.find((n) => n.subgraph).tessera?.error"
    page.wait_for_function(f"!{error}")
    assert frontend.crashes == []


LINK_NAME = """type => {
  const source = LiteGraph.createNode(type)
  app.graph.add(source)
  const text = source.widgets?.find((w) => w.name === 'value')
  if (text) text.value = 'known'
  const train = app.graph.nodes.find((n) => n.type === 'TesseraTrainLora')
  source.connect(0, train, train.inputs.findIndex((i) => i.name === 'output_name'))
}"""


def test_a_name_that_is_linked_is_followed_to_where_it_is_written(frontend, comfyui):
    folder = comfyui.base / "output" / "loras" / "known (001)"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"output_name": "known", "model": "FLUX", "steps": 1}))
    (folder / "progress.jsonl").write_text(json.dumps({"kind": "step", "step": 1, "loss": 1.0, "rate": 1e-4}) + "\n")
    open_graph(frontend, graph(frontend.ENCODERS, "of no run"))
    panel = frontend.page.locator(".tessera-run")
    for source, count in [("PrimitiveString", 1), ("StringConcatenate", 0), ("PrimitiveNode", 1)]:
        frontend.page.evaluate(LINK_NAME, source)
        if source == "PrimitiveNode":  # it has taken the value of the widget that it stands for
            frontend.page.evaluate("app.graph.nodes.find((n) => n.type === 'PrimitiveNode').widgets[0].value = 'known'")
        redraw(frontend.page)
        playwright.expect(panel).to_have_count(count)
    assert frontend.crashes == []


TELL = "detail => app.api.dispatchEvent(new CustomEvent('tessera.train', { detail }))"


def test_buttons_of_a_run_keep_the_focus_and_say_what_went_wrong(frontend, comfyui):
    folder = comfyui.base / "output" / "loras" / "pressed (001)"
    folder.mkdir(parents=True)
    lines = [{"kind": "step", "step": step, "loss": 1.0, "rate": 1e-4} for step in (1, 2)]
    lines += [{"kind": "saved", "step": step, "file": "a"} for step in (1, 2)]
    lines.append({"kind": "end", "status": "finished", "step": 2, "text": ""})
    (folder / "run.json").write_text(json.dumps({"output_name": "pressed", "model": "FLUX", "steps": 2}))
    (folder / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "pressed.safetensors").touch()
    open_graph(frontend, graph(frontend.ENCODERS, "pressed"))
    panel_says(frontend, "Finished")
    page, button = frontend.page, frontend.page.get_by_role("button", name="Compare saves")
    button.focus()
    focused = "document.activeElement.textContent"
    for kind in ({"kind": "note", "text": "a note"}, {"kind": "validation", "step": 1, "loss": 0.5}):
        page.evaluate(TELL, {"node": "6", **kind})
        playwright.expect(page.locator(".tessera-report")).to_contain_text("a note")
        assert page.evaluate(focused) == "Compare saves"
    notes = [{"node": "6", "kind": "note", "text": f"note {number}"} for number in range(300)]
    page.evaluate(f"notes => notes.forEach({TELL})", notes)
    report = page.locator(".tessera-report")
    playwright.expect(report).to_contain_text("note 299")
    assert report.inner_text().count("note") == 100
    detail = {"node_id": "6", "node_type": "TesseraTrainLora", "exception_message": "an error"}  # above the panel
    page.evaluate("detail => app.api.dispatchEvent(new CustomEvent('execution_error', { detail }))", detail)
    playwright.expect(page.locator(".tessera-error")).to_have_text("an error")
    assert page.evaluate(focused) == "Compare saves"
    page.context.set_offline(True)
    try:
        button.click()
        panel_says(frontend, "The server does not answer.")
    finally:
        page.context.set_offline(False)
    assert frontend.crashes == []


# ComfyUI loads the open workflow anew a while after its language was set: it is done with both.
SET_LANGUAGE = """async language => {
  const loaded = new Promise((resolve) => {
    app.loadGraphData = async (...given) => {
      delete app.loadGraphData
      await app.loadGraphData(...given)
      resolve()
    }
  })
  await app.extensionManager.setting.set('Comfy.Locale', language)
  await loaded
}"""


def test_the_panel_speaks_the_language_of_the_settings(frontend, comfyui):
    folder = comfyui.base / "output" / "loras" / "spoken (001)"
    folder.mkdir(parents=True)
    lines = [{"kind": "step", "step": 1, "loss": 1.0, "rate": 1e-4}, {"kind": "end", "status": "finished", "text": ""}]
    (folder / "run.json").write_text(json.dumps({"output_name": "spoken", "model": "FLUX", "steps": 1}))
    (folder / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    open_graph(frontend, graph(frontend.ENCODERS, "spoken"))
    panel_says(frontend, "Step 1 / 1")
    frontend.page.evaluate(SET_LANGUAGE, "zh")
    try:
        for text in ("第 1 / 1 步", "已完成", "学习率 0.0001"):
            panel_says(frontend, text)
        widget = (
            "app.graph.nodes.find((n) => n.type === 'TesseraTrainLora').widgets.find((w) => w.name === 'tessera_more')"
        )
        assert frontend.page.evaluate(f"{widget}.label.startsWith('显示其余 ')")
        assert frontend.crashes == []
    finally:
        frontend.page.evaluate(SET_LANGUAGE, "en")

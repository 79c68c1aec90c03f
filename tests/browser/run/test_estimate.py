"""Train LoRA's Estimate in ComfyUI's own frontend: what it queues, what it shows, and that no run follows."""

import pytest
from tiny.nodes.live_page import center, open_graph
from tiny.nodes.prompt import node

playwright = pytest.importorskip("playwright.sync_api")

TRAIN = "app.graph.nodes.find((n) => n.type === 'TesseraTrainLora')"
PRESS = f"() => {TRAIN}.widgets.find((w) => w.name === 'tessera_estimate').callback()"
SHOWN = f"() => {TRAIN}.widgets.find((w) => w.name === 'tessera_report')?.element.textContent ?? ''"
VALUES = "() => app.graph.serialize().nodes.find((n) => n.type === 'TesseraTrainLora').widgets_values"


def graph(encoders, **changes):
    train = {"output_name": "estimated", "steps": 1000, "learning_rate": 1e-3, "rank": 4, "batch_size": 1, "seed": 0}
    train |= {"gradient_accumulation": 1, "compile": "off", "save_every": 0, "resume": "latest"}
    return {
        "1": node("UNETLoader", unet_name="flux1-dev.safetensors", weight_dtype="default"),
        "2": node("TesseraTinyClipLoader", **encoders),
        "3": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "4": node("CLIPTextEncode", clip=["2", 0], text="a fox"),
        "5": node("TesseraLatentsToDataset", latents=["3", 0], positive=["4", 0], max_graphs=1),
        "6": node("TesseraTrainLora", model=["1", 0], data=["5", 0], **{**train, **changes}),
        "7": node("TesseraSaveLora", lora=["6", 0], filename_prefix="estimated", format="kohya", dtype="fp32"),
    }


def shows(page, text):
    page.wait_for_function(f"text => ({SHOWN})().includes(text)", arg=text)


def answered_late(route, comfyui):
    # the prompt is over before the page hears that it was queued
    answer = route.fetch()
    comfyui.wait(answer.json()["prompt_id"])
    route.fulfill(response=answer)


def test_the_button_shows_time_and_memory_and_trains_nothing(frontend, comfyui):
    page = frontend.page
    open_graph(frontend, graph(frontend.ENCODERS))
    prompt, values = frontend.prompt(), page.evaluate(VALUES)
    assert "tessera_estimate" not in prompt["6"]["inputs"]
    before = sorted((comfyui.base / "output").rglob("*"))
    posts = lambda reply: reply.url.endswith("/prompt") and reply.request.method == "POST"  # noqa: E731
    page.route("**/prompt", lambda route: answered_late(route, comfyui))
    with page.expect_response(posts) as answer:
        page.evaluate(PRESS)
    page.unroute("**/prompt")
    queued = answer.value.request.post_data_json["prompt"]
    expected = {number: prompt[number] for number in "123456"}
    assert queued == {**expected, "6": {**prompt["6"], "class_type": "TesseraTrainingEstimate"}}
    comfyui.wait(answer.value.json()["prompt_id"])
    shows(page, " for 1,000 steps.")
    shows(page, "Calculated from the measured step, not tried:")
    assert sorted((comfyui.base / "output").rglob("*")) == before
    assert frontend.prompt() == prompt and page.evaluate(VALUES) == values
    center(page, 1)
    frontend.picture("estimate", "TesseraTrainLora")
    frontend.set_widgets({"TesseraTrainLora": {"output_name": ".."}})
    with page.expect_response(posts) as answer:
        page.evaluate(PRESS)
    comfyui.wait(answer.value.json()["prompt_id"])
    shows(page, "output_name is '..'; use a plain name")
    assert frontend.crashes == []


DOES_NOT_FIT = f"""fixes => {TRAIN}.onExecuted({{ tessera: [{{
  estimate: {{}}, lines: ["It doesn't fit: the first steps ran out of memory."], rows: [], fixes,
}}] }})"""
SET_IN = """type => app.graph.nodes.filter((n) => n.type === type)
  .map((n) => Object.fromEntries(n.widgets.map((w) => [w.name, w.value])))"""


def test_a_button_sets_each_change_where_its_setting_is(frontend):
    page = frontend.page
    open_graph(frontend, graph(frontend.ENCODERS, batch_size=4))
    fixes = {"blocks_to_swap": -1, "quantize": "int8", "batch_size": 2, "megapixels": 0.5}
    page.evaluate(DOES_NOT_FIT, [{"name": name, "value": value} for name, value in fixes.items()])
    shows(page, "It doesn't fit")
    center(page, 1)
    for name, value in fixes.items():
        page.get_by_role("button", name=f"Set {name} to {value}").evaluate("button => button.click()")
        # the data of this graph has no megapixels
        shows(page, f"{name} is {value} now." if name != "megapixels" else f"{name} comes from another node; set it to")
    (memory,) = page.evaluate(SET_IN, "TesseraMemory")
    assert (memory["blocks_to_swap"], memory["quantize"], memory["checkpointing"]) == (-1, "int8", "auto")
    (train,) = (entry for entry in frontend.prompt().values() if entry["class_type"] == "TesseraTrainLora")
    assert train["inputs"]["batch_size"] == 2 and frontend.prompt()[train["inputs"]["memory"][0]]
    assert frontend.crashes == [] and "overlapping" not in frontend.faults()

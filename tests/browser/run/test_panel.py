"""The panel of a run with a Training Preview: Sample now, the strip that opens large, Compare saves, and subgraphs."""

import os

import pytest
from renderers import renderers
from tiny.nodes.live_page import center, open_graph, panel_says, press_run, with_previews
from tiny.nodes.server_runs import paused_at

playwright = pytest.importorskip("playwright.sync_api")


STRIP = "[...document.querySelectorAll('.tessera-previews img')].map((i) => i.alt)"
LOADED = "[...document.querySelectorAll('.tessera-previews img')].every((i) => i.complete && i.naturalWidth > 0)"


def titles(*steps, seed=3):
    return [f"a fox, seed {seed}, step {step}" for step in steps]


def picture(page, name):
    if folder := os.environ.get("TESSERA_LOOK"):
        page.screenshot(path=f"{folder}/{name}.png")


@renderers("canvas renderer")
def test_previews_are_sampled_when_asked_open_large_and_saves_are_compared(frontend, comfyui, new_renderer):
    name = "new_strip" if new_renderer else "old_strip"
    frontend.use_new_renderer(new_renderer)
    page = frontend.page
    open_graph(frontend, with_previews(frontend.ENCODERS, name))
    prompt = frontend.prompt()
    with paused_at(comfyui, 6):
        prompt_id = press_run(frontend)
        panel_says(frontend, "Step 6 / 12")
        button = page.get_by_role("button", name="Sample now")
        playwright.expect(button).to_be_enabled()
        page.wait_for_function(f"({STRIP}).length === 2")
        assert page.evaluate(STRIP) == titles(0, 4)
        center(page)
        button.click()
        panel_says(frontend, "Sample now: after this step.")
        picture(page, f"running_{name}")
    comfyui.wait(prompt_id)
    panel_says(frontend, "Done in 0:")
    page.wait_for_function(f"({STRIP}).length === 5")
    labels = page.evaluate(STRIP)
    step = int(labels[2].rpartition(" ")[2])
    assert 6 <= step < 8 and labels == titles(0, 4, step, 8, 12)
    page.wait_for_function(LOADED)
    last = "[...document.querySelectorAll('.tessera-previews img')].at(-1).getBoundingClientRect().right"
    page.wait_for_function(f"{last} <= document.querySelector('.tessera-previews').getBoundingClientRect().right + 1")
    picture(page, f"ended_{name}")
    frontend.picture("previews", "TesseraTrainLora", themes=("dark", "light"))

    page.get_by_role("button", name=f"{titles(4)[0]}").first.click()
    large = page.locator(".tessera-large img")
    playwright.expect(large).to_have_attribute("alt", titles(4)[0])
    page.wait_for_function("document.querySelector('.tessera-large img').naturalWidth === 64")
    picture(page, f"large_{name}")
    frontend.picture("preview_large")
    for key, alt in [("ArrowRight", titles(step)), ("ArrowDown", titles(step, seed=4)), ("End", titles(12, seed=4))]:
        page.keyboard.press(key)
        playwright.expect(large).to_have_attribute("alt", alt[0])
    page.keyboard.press("Delete")  # of the page: it would remove what is chosen
    page.keyboard.press("Escape")
    playwright.expect(large).to_have_count(0)
    page.get_by_role("button", name=titles(12)[0]).first.click()
    page.locator(".tessera-large").click(position={"x": 10, "y": 10})
    playwright.expect(large).to_have_count(0)
    page.get_by_role("button", name="1 of 2").click()
    assert page.evaluate(STRIP) == titles(0, 4, step, 8, 12, seed=4)
    assert frontend.prompt() == prompt

    center(page)
    page.get_by_role("button", name="Compare saves").click()
    panel_says(frontend, "Compare LoRAs is in the graph; press Run.")
    compare = next(n for n in frontend.prompt().values() if n["class_type"] == "TesseraCompareLoras")["inputs"]
    assert compare["model"] == ["1", 0] and compare["vae"] == ["3", 0] and compare["positive"] == ["5", 0]
    assert (compare["width"], compare["steps"], compare["seed"], compare["seeds"]) == (64, 1, 3, 2)
    saves = compare["loras"].splitlines()
    assert len(saves) == 3 and saves[-1].endswith(f"/{name}.safetensors") and "step000004" in saves[0]
    picture(page, f"compare_{name}")
    history = comfyui.wait(press_run(frontend))
    assert history["status"]["status_str"] == "success"
    (grid,) = [output["images"] for key, output in history["outputs"].items() if key not in prompt]
    assert len(grid) == 1
    center(page)
    page.get_by_role("button", name="Compare saves").click()
    assert page.evaluate("app.graph.nodes.filter((n) => n.type === 'TesseraCompareLoras').length") == 1
    assert frontend.faults() == {} and frontend.crashes == []

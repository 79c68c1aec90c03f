"""Training Preview in ComfyUI's own frontend: the sheet so far stands on the training node while it trains."""

import pytest
from tiny.prompt import node

playwright = pytest.importorskip("playwright.sync_api")


def graph(encoders):
    size = {"width": 64, "height": 64}
    return {
        "1": node("UNETLoader", unet_name="flux1-dev.safetensors", weight_dtype="default"),
        "2": node("TesseraTinyClipLoader", **encoders),
        "3": node("VAELoader", vae_name="ae.safetensors"),
        "4": node("EmptySD3LatentImage", **size, batch_size=1),
        "5": node("CLIPTextEncode", clip=["2", 0], text="a fox"),
        "6": node("TesseraLatentsToDataset", latents=["4", 0], positive=["5", 0], max_graphs=1),
        "7": node(
            "TesseraPreview", vae=["3", 0], positive=["5", 0], every_n_steps=2, at_start=True, **size, steps=1, cfg=1.0,
            sampler_name="euler", scheduler="simple", seed=3, seeds=1, frames=1, label="a fox", fps=16.0, use_ema=True,
        ),
        "8": node(
            "TesseraTrainLora", model=["1", 0], data=["6", 0], output_name="watched", steps=100000, learning_rate=1e-3,
            rank=4, batch_size=1, gradient_accumulation=1, seed=0, compile="off", save_every=0, resume="off",
            preview=["7", 0],
        ),
    }  # fmt: skip


# The heights of the sheet on the node, frame by frame, from the first in which the node has grown for it.
WATCH = """() => {
  window.heights = []
  const look = () => {
    const image = document.querySelector('.tessera-report > img')
    const height = image?.getBoundingClientRect().height ?? 0
    if (height > 20 || window.heights.length) window.heights.push(height)
    requestAnimationFrame(look)
  }
  look()
}"""


def test_the_sheet_so_far_is_seen_on_the_node_while_it_trains(frontend, comfyui):
    """100000 steps would take hours: what is seen is seen before the end. A sheet stays until the next one is loaded,
    however long that takes."""
    page = frontend.page
    page.evaluate("prompt => app.loadApiJson(prompt, 'watched')", graph(frontend.ENCODERS))
    page.wait_for_function("app.graph.nodes.length === 8")
    page.route("**/view?*", lambda route: (page.wait_for_timeout(300), route.continue_()))
    page.evaluate(WATCH)
    with page.expect_response(lambda r: r.url.endswith("/prompt") and r.request.method == "POST") as answer:
        page.get_by_test_id("queue-button").first.click()
    prompt_id = answer.value.json()["prompt_id"]
    try:
        sheet = page.locator(".tessera-report > img")
        playwright.expect(sheet).to_be_visible()
        for _ in range(3):
            shown = sheet.get_attribute("alt")
            assert shown.startswith("Previews up to step ")
            another = "alt => document.querySelector('.tessera-report > img').alt !== alt"
            page.wait_for_function(another, arg=shown)
        assert page.evaluate("document.querySelector('.tessera-report > img').naturalWidth") > 64
        heights = page.evaluate("window.heights")
        assert len(heights) > 3 and min(heights) > 20
    finally:
        page.unroute_all(behavior="ignoreErrors")
        comfyui.cancel(prompt_id)
    assert frontend.faults() == {} and frontend.crashes == []


TELL = "detail => app.api.dispatchEvent(new CustomEvent('tessera.train', { detail }))"


def test_what_comes_last_is_shown_on_the_nodes_that_it_is_for(frontend):
    """The second of two experts counts its steps from the start again; of a workflow that was opened meanwhile another
    node may have the id."""
    page = frontend.page
    page.evaluate("prompt => app.loadApiJson(prompt, 'told')", graph(frontend.ENCODERS))
    page.wait_for_function("app.graph.nodes.length === 8")
    for step in (1000, 250):
        sheet = {"kind": "preview", "filename": "example.png", "subfolder": "", "type": "input", "step": step}
        page.evaluate(TELL, {**sheet, "node": "8"})
        page.wait_for_function(
            "alt => document.querySelector('.tessera-report > img')?.alt === alt", arg=f"Previews up to step {step}"
        )
    page.evaluate(TELL, {"kind": "note", "node": "1", "text": "A note"})
    page.evaluate(TELL, {"kind": "note", "node": "8", "text": "Another note"})
    shown = "app.graph.nodes.filter((n) => n.widgets?.some((w) => w.name === 'tessera_report')).map((n) => n.type)"
    assert page.evaluate(shown) == ["TesseraTrainLora"]
    assert page.locator(".tessera-report").inner_text().strip() == "Another note"
    assert frontend.crashes == []

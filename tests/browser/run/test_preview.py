"""Training Preview in ComfyUI's own frontend: the sheet so far stands on the training node while it trains."""

import pytest
from tiny.nodes.live_page import with_previews

playwright = pytest.importorskip("playwright.sync_api")


def graph(encoders, name):
    """Trains for hours if it is left to."""
    preview = {"every_n_steps": 2, "seeds": 1}
    return with_previews(encoders, name, preview, steps=100000, save_every=0, resume="off")


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
    """A sheet stays until the next one is loaded, however long that takes."""
    page = frontend.page
    page.evaluate("prompt => app.loadApiJson(prompt, 'watched')", graph(frontend.ENCODERS, "watched"))
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
            alt = sheet.get_attribute("alt")
            assert alt.startswith("Previews up to step ")
            another = "alt => document.querySelector('.tessera-report > img').alt !== alt"
            page.wait_for_function(another, arg=alt)
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
    page.evaluate("prompt => app.loadApiJson(prompt, 'told')", graph(frontend.ENCODERS, "of no run"))
    page.wait_for_function("app.graph.nodes.length === 8")
    for step in (1000, 250):
        sheet = {"kind": "preview", "filename": "example.png", "subfolder": "", "type": "input", "step": step}
        page.evaluate(TELL, {**sheet, "node": "8"})
        page.wait_for_function(
            "alt => document.querySelector('.tessera-report > img')?.alt === alt", arg=f"Previews up to step {step}"
        )
    page.evaluate(TELL, {"kind": "note", "node": "1", "text": "A note"})
    page.evaluate(TELL, {"kind": "note", "node": "8", "text": "Another note"})
    expression = "app.graph.nodes.filter((n) => n.widgets?.some((w) => w.name === 'tessera_report')).map((n) => n.type)"
    assert page.evaluate(expression) == ["TesseraTrainLora"]
    assert page.locator(".tessera-report").inner_text().strip() == "Another note"
    assert frontend.crashes == []

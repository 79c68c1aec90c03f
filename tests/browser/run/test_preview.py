"""Lines of a run on its node, in ComfyUI's own frontend."""

import pytest
from tiny.nodes.live_page import with_previews

playwright = pytest.importorskip("playwright.sync_api")


TELL = "detail => app.api.dispatchEvent(new CustomEvent('tessera.train', { detail }))"


def test_latest_preview_is_shown_on_the_nodes_that_it_is_for(frontend):
    """Of a workflow that was opened meanwhile another node may have the id."""
    page = frontend.page
    page.evaluate("prompt => app.loadApiJson(prompt, 'told')", with_previews(frontend.ENCODERS, "of no run"))
    page.wait_for_function("app.graph.nodes.length === 8")
    page.evaluate(TELL, {"kind": "note", "node": "1", "text": "A note"})
    page.evaluate(TELL, {"kind": "note", "node": "8", "text": "Another note"})
    expression = "app.graph.nodes.filter((n) => n.widgets?.some((w) => w.name === 'tessera_report')).map((n) => n.type)"
    assert page.evaluate(expression) == ["TesseraTrainLora"]
    assert page.locator(".tessera-report").inner_text().strip() == "Another note"
    assert frontend.crashes == []

"""Runs in the browser, as several tests need them: a graph in the page, Run, and the words of the panel."""

from typing import Any


def open_graph(frontend: Any, prompt: dict[str, Any]) -> None:
    frontend.page.evaluate("prompt => app.loadApiJson(prompt, 'live')", prompt)
    frontend.page.wait_for_function("count => app.graph.nodes.length === count", arg=len(prompt))


def press_run(frontend: Any) -> Any:
    """Presses Run; returns the prompt's id, None where the server refuses it."""
    posts = lambda reply: reply.url.endswith("/prompt") and reply.request.method == "POST"  # noqa: E731
    with frontend.page.expect_response(posts) as answer:
        frontend.page.get_by_test_id("queue-button").first.click()
    return answer.value.json().get("prompt_id")


def panel_says(frontend: Any, text: str) -> None:
    from playwright.sync_api import expect

    expect(frontend.page.locator(".tessera-run")).to_contain_text(text)


def center(page: Any) -> None:
    """All of Train LoRA, which is taller than a page."""
    page.evaluate(
        """() => {
            app.canvas.ds.scale = 0.5
            app.canvas.centerOnNode(app.graph.nodes.find((node) => node.type === 'TesseraTrainLora'))
        }"""
    )


def redraw(page: Any) -> None:
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

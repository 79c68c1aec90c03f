"""Runs in the browser, as several tests need them: a graph in the page, Run, and the words of the panel."""

from typing import Any

from tiny.nodes.prompt import node


def with_previews(
    encoders: dict[str, str], name: str, preview: dict[str, Any] | None = None, **train: Any
) -> dict[str, Any]:
    """The prompt that trains the tiny FLUX with a Training Preview; `preview` and `train` change inputs of the two."""
    size = {"width": 64, "height": 64}
    look = {"every_n_steps": 4, "at_start": True, **size, "steps": 1, "cfg": 1.0, "sampler_name": "euler"}
    look |= {"scheduler": "simple", "seed": 3, "seeds": 2, "frames": 1, "label": "a fox", "fps": 16.0, "use_ema": True}
    run = {"output_name": name, "steps": 12, "learning_rate": 1e-3, "rank": 4, "batch_size": 1, "seed": 0}
    run |= {"gradient_accumulation": 1, "compile": "off", "save_every": 4, "resume": "latest", **train}
    return {
        "1": node("UNETLoader", unet_name="flux1-dev.safetensors", weight_dtype="default"),
        "2": node("TesseraTinyClipLoader", **encoders),
        "3": node("VAELoader", vae_name="ae.safetensors"),
        "4": node("EmptySD3LatentImage", **size, batch_size=1),
        "5": node("CLIPTextEncode", clip=["2", 0], text="a fox"),
        "6": node("TesseraLatentsToDataset", latents=["4", 0], positive=["5", 0], max_graphs=1),
        "7": node("TesseraPreview", vae=["3", 0], positive=["5", 0], **look | (preview or {})),
        "8": node("TesseraTrainLora", model=["1", 0], data=["6", 0], preview=["7", 0], **run),
    }


def open_graph(frontend: Any, prompt: dict[str, Any]) -> None:
    frontend.page.evaluate("prompt => app.loadApiJson(prompt, 'live')", prompt)
    frontend.page.wait_for_function("count => app.graph.nodes.length === count", arg=len(prompt))


def press_run(frontend: Any) -> Any:
    """Press Run. Return the prompt's id, None if the server refuses it."""
    posts = lambda reply: reply.url.endswith("/prompt") and reply.request.method == "POST"  # noqa: E731
    with frontend.page.expect_response(posts) as answer:
        frontend.page.get_by_test_id("queue-button").first.click()
    return answer.value.json().get("prompt_id")


def panel_says(frontend: Any, text: str) -> None:
    from playwright.sync_api import expect

    expect(frontend.page.locator(".tessera-run:visible")).to_contain_text(text)


def center(page: Any, zoom: float = 0.5) -> None:
    """Show all of Train LoRA, which at zoom 1 is taller than a page."""
    page.evaluate(
        """zoom => {
            app.canvas.ds.scale = zoom
            app.canvas.centerOnNode(app.graph.nodes.find((node) => node.type === 'TesseraTrainLora'))
        }""",
        zoom,
    )


def redraw(page: Any) -> None:
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

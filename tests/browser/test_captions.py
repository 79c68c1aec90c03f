"""The editor of captions in ComfyUI's own frontend, opened from the gallery of a folder node."""

import pytest
from PIL import Image
from renderers import renderers
from tessera.data.captioning.ledger import Ledger, LedgerEntry
from tiny.nodes.prompt import node

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect


@renderers("canvas renderer")
def test_captions_are_typed_with_keys_alone_and_replaced_in_the_whole_folder(frontend, comfyui, new_renderer):
    frontend.use_new_renderer(new_renderer)
    page, name = frontend.page, f"typed_{new_renderer}"
    folder = comfyui.base / "input" / name
    folder.mkdir()
    for letter, colour in zip("abc", ("red", "green", "blue"), strict=True):
        Image.new("RGB", (300, 200), colour).save(folder / f"{letter}.png")
    (folder / "a.txt").write_text("a red field")
    (folder / "b.txt").write_text("a green field <b>é</b>")
    page.evaluate(
        "prompt => app.loadApiJson(prompt, 'captions')", {"1": node("TesseraImageFolder", folder=f"input/{name}")}
    )
    tiles = page.locator(".tessera-tile")
    expect(tiles).to_have_count(3)
    page.evaluate("app.canvas.centerOnNode(app.graph.nodes[0])")
    page.wait_for_timeout(300)
    page.locator(".tessera-tile-caption").nth(1).click()

    editor, text = page.locator(".tessera-editor"), page.get_by_label("Caption", exact=True)
    expect(editor).to_contain_text("2 of 3: b.png")
    expect(text).to_be_focused()
    expect(text).to_have_value("a green field <b>é</b>")
    page.wait_for_function("document.querySelector('.tessera-editor img').naturalWidth === 300")
    page.keyboard.press("PageDown")
    expect(editor).to_contain_text("No caption yet: it will be saved as c.txt.")
    page.keyboard.type("a blue field")
    page.keyboard.press("PageDown")
    expect(editor).to_contain_text("This is the last one.")
    assert (folder / "c.txt").read_text() == "a blue field"
    page.keyboard.press("PageUp")
    page.keyboard.press("PageUp")
    expect(editor).to_contain_text("1 of 3: a.png")

    page.get_by_label("Search in all captions").fill("FIELD")
    page.get_by_label("Replace with").fill("meadow")
    expect(editor).to_contain_text("Matches: 3, in captions: 3")
    assert (folder / "a.txt").read_text() == "a red field"
    if not new_renderer:
        frontend.picture("captions", locator=editor)
    page.get_by_role("button", name="Replace all").click()
    expect(editor).to_contain_text("Captions changed: 3.")
    expect(text).to_have_value("a red meadow")
    page.get_by_role("button", name="Undo").click()
    expect(text).to_have_value("a red field")
    assert [(folder / f"{letter}.txt").read_text() for letter in "abc"] == [
        *("a red field", "a green field <b>é</b>", "a blue field"),
    ]

    text.fill("mine")
    (folder / "a.txt").write_text("another's")
    page.keyboard.press("Escape")
    expect(editor).to_contain_text("was changed elsewhere meanwhile")
    page.keyboard.press("Escape")
    expect(editor).to_have_count(0)
    expect(tiles).to_have_text(["another's", "a green field <b>é</b>", "a blue field"])
    assert page.evaluate("app.graph.nodes.length") == 1 and frontend.crashes == []


def test_captions_of_a_model_are_looked_at_one_by_one(frontend, comfyui):
    page = frontend.page
    folder = comfyui.base / "input" / "written"
    folder.mkdir()
    ledger = Ledger(comfyui.base / "user" / "tessera" / "captions")
    for name in ("a", "b", "c"):
        Image.new("RGB", (300, 200), "red").save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"{name} of a model")
        ledger.put(folder / f"{name}.png", LedgerEntry("key", waits=name != "b"))
    ledger.save()
    page.evaluate(
        "prompt => app.loadApiJson(prompt, 'written')", {"1": node("TesseraCaptionFolder", folder="input/written")}
    )
    page.evaluate("app.canvas.centerOnNode(app.graph.nodes[0])")
    review = page.get_by_role("button", name="Review 2")
    expect(review).to_be_visible()
    frontend.picture("caption_folder", "TesseraCaptionFolder")
    review.click()
    editor, text = page.locator(".tessera-editor"), page.get_by_label("Caption", exact=True)
    expect(editor).to_contain_text("Written by a model, 2 to look at.")
    expect(text).to_have_value("a of a model")
    page.keyboard.press("PageDown")
    expect(text).to_have_value("c of a model")
    expect(editor).to_contain_text("Written by a model, 1 to look at.")
    text.fill("mine")
    page.keyboard.press("PageDown")
    expect(editor).to_contain_text("This is the last one.")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Review")).to_have_count(0)
    assert [(folder / f"{name}.txt").read_text() for name in "abc"] == ["a of a model", "b of a model", "mine"]
    assert frontend.crashes == []

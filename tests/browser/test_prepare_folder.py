"""The preparation of a folder in ComfyUI's own frontend: the brush on a picture, and the button of Check Folder."""

import numpy as np
import pytest
from PIL import Image
from tiny.data.photographs import HEIGHT, WIDTH, make_photograph, write_photographs
from tiny.nodes.prompt import node

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect


@pytest.fixture(scope="module")
def photos(comfyui):
    """Two photographs, and one that is too small."""
    folder = comfyui.base / "input" / "brushed"
    write_photographs(folder, 2)
    make_photograph(7, WIDTH // 3, HEIGHT // 3).save(folder / "small.png")
    (folder / "small.txt").write_text("a small photograph")
    return folder


def open_graph(frontend, prompt):
    frontend.page.evaluate("prompt => app.loadApiJson(prompt, 'brushed')", prompt)
    frontend.page.wait_for_function("count => app.graph.nodes.length === count", arg=len(prompt))


def test_a_mask_is_drawn_undone_redone_and_saved(frontend, photos):
    page = frontend.page
    open_graph(frontend, {"1": node("TesseraImageFolder", folder="input/brushed")})
    tile = page.locator(".tessera-tile").first
    tile.hover()
    tile.locator(".tessera-brush").click()
    dialog = page.locator(".tessera-mask")
    canvas = dialog.locator("canvas")
    expect(canvas).to_be_visible()
    box = canvas.bounding_box()

    def stroke(height):
        page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + box["height"] * height)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + box["height"] * height, steps=4)
        page.mouse.up()

    expect(dialog.get_by_role("status")).to_have_text("Paint what is learnt; what stays red is not.")
    stroke(0.25)
    expect(dialog.locator(".tessera-mask-ring")).to_be_visible()  # as large as the brush
    stroke(0.8)
    dialog.get_by_role("button", name="Undo").click()
    frontend.picture("mask_brush", locator=dialog)
    dialog.get_by_role("button", name="Save").click()
    expect(dialog).to_have_count(0)
    expect(page.locator(".tessera-brush.tessera-masked")).to_have_count(1)
    mask = np.asarray(Image.open(photos / "masks" / "000.png", formats=["PNG"]))
    assert mask.shape == (HEIGHT, WIDTH)
    assert mask[round(HEIGHT * 0.25), WIDTH // 2] == 255  # the first stroke; the second was undone
    assert mask[-5:].max() == 0 and mask[:, :5].max() == 0

    tile.locator(".tessera-brush").click()
    expect(canvas).to_be_visible()
    dialog.get_by_role("button", name="All", exact=True).click()
    dialog.get_by_role("button", name="Leave out").click()
    stroke(0.25)
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+y")
    page.keyboard.press("Escape")
    expect(dialog.get_by_role("status")).to_contain_text("This mask isn’t saved yet. Press Esc again")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog).to_have_count(0)
    mask = np.asarray(Image.open(photos / "masks" / "000.png", formats=["PNG"]))
    assert mask[round(HEIGHT * 0.25), WIDTH // 2] == 0 and mask[-5:].min() == 255


def test_files_that_check_folder_lists_are_left_out_by_one_click(frontend, photos):
    page = frontend.page
    megapixels = WIDTH * HEIGHT / 1024**2
    prompt = {
        "1": node("TesseraImageFolder", folder="input/brushed"),
        "2": node("TesseraCheckFolder", folder="input/brushed", megapixels=round(megapixels, 2)),
    }
    open_graph(frontend, prompt)
    frontend.run()
    page.evaluate("app.canvas.centerOnNode(app.graph.nodes.find((n) => n.type === 'TesseraCheckFolder'))")
    leave_out = page.locator(".tessera-leave-out")
    expect(leave_out).to_have_text("Leave 1 out in Training Images")
    frontend.picture("check_folder", "TesseraCheckFolder")
    leave_out.click()
    expect(page.get_by_text("Training Images leaves them out")).to_be_visible()
    assert frontend.prompt()["1"]["inputs"]["leave_out"] == "small.png"

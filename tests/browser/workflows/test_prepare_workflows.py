"""The workflows before and after a training in ComfyUI's own frontend: Prepare a folder, and Which picture hurts."""

import pytest
from comfy_server import PACK
from tiny.data.photographs import HEIGHT, WIDTH, make_photograph, write_photographs

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

MEGAPIXELS = round(WIDTH * HEIGHT / 1024**2, 2)


def workflow(name):
    return (PACK / "workflows" / f"{name}.json").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def photos(comfyui):
    """Eight photographs, a small one, and a double; one of them has no caption."""
    folder = comfyui.base / "input" / "to_prepare"
    write_photographs(folder, 8)
    make_photograph(9, WIDTH // 3, HEIGHT // 3).save(folder / "small.png")
    make_photograph(3).crop((4, 4, WIDTH - 4, HEIGHT - 4)).save(folder / "double.jpg", quality=80)
    for name in ("small", "double"):
        (folder / f"{name}.txt").write_text(f"photo of sks thing, {name}")
    return folder


def test_prepare_a_folder_lists_what_to_leave_out_and_shows_the_captions(frontend, photos):
    page = frontend.page
    frontend.drop(workflow("prepare_folder"))
    folder = {"folder": "input/to_prepare"}
    check = folder | {"megapixels": MEGAPIXELS}
    kinds = ["TesseraCheckFolder", "TesseraImageFolder", "TesseraCaptionFolder"]
    frontend.set_widgets({"TesseraCheckFolder": check, "TesseraImageFolder": folder, "TesseraCaptionFolder": folder})
    _, entry = frontend.run()
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"]
    leave_out = page.locator(".tessera-leave-out")
    expect(leave_out).to_have_text("Leave 2 out in Training Images")
    report = page.locator(".tessera-report").filter(has_text="10 pictures, 2 with a finding.")
    expect(report).to_contain_text("Near-doubles (1): double.jpg")
    expect(report).to_contain_text("Small, so that training enlarges them (1): small.png")
    frontend.picture("prepare_folder", *kinds, "PreviewImage")
    page.evaluate("app.canvas.centerOnNode(app.graph.nodes.find((n) => n.type === 'TesseraCheckFolder'))")
    leave_out.click()
    expect(page.get_by_text("Training Images leaves them out")).to_be_visible()
    inputs = {node["class_type"]: node["inputs"] for node in frontend.prompt().values()}
    assert sorted(inputs["TesseraImageFolder"]["leave_out"].split("\n")) == ["double.jpg", "small.png"]
    assert frontend.faults() == {} and frontend.crashes == []


def test_which_picture_hurts_shows_a_bar_for_each_picture_and_what_to_leave_out(frontend, photos):
    frontend.drop(workflow("which_picture_hurts"))
    frontend.use_tiny_encoders()
    values = {
        "TesseraImageFolder": {"folder": "input/to_prepare"},
        "TesseraPrepareDataset": {"megapixels": 0.02, "more_megapixels": "0.04"},
        "TesseraTrainLora": {"steps": 160, "compile": "off", "output_name": "hurts"},
        "TesseraValidation": {"every_n_steps": 80},
        "TesseraPreview": {"width": 64, "height": 64, "steps": 1, "every_n_steps": 80},
        "TesseraMemory": {"blocks_to_swap": 0},
    }
    frontend.set_widgets(values)
    prompt, entry = frontend.run()
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"]
    outputs = {prompt[node]["class_type"]: output for node, output in entry["outputs"].items()}
    (text,) = outputs["TesseraLossByPicture"]["text"]
    assert "pictures, measured at step 160 against the base model at the same noise." in text
    assert len(outputs["TesseraLossByPicture"]["images"]) == 1
    frontend.page.wait_for_timeout(1000)  # until the sheet is drawn
    frontend.picture("which_picture_hurts", "TesseraLossByPicture", "PreviewAny", "TesseraLossPlot")
    assert frontend.faults() == {} and frontend.crashes == []

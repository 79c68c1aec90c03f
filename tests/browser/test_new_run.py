"""The form New LoRA of the sidebar tab Training, in ComfyUI's own frontend."""

import json
import shutil
import time

import pytest
from PIL import Image
from renderers import renderers

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

# Values of widgets by type of node and name, of the open workflow.
WIDGETS = """() => Object.fromEntries(app.graph.nodes.map((node) => [
  node.type, Object.fromEntries((node.widgets ?? []).map((widget) => [widget.name, widget.value])),
]))"""


@pytest.fixture
def dogs(comfyui):
    """A folder with a picture, listed by the server, which keeps its lists for some seconds."""
    folder = comfyui.base / "input" / "dogs"
    folder.mkdir()
    Image.new("RGB", (64, 64), "brown").save(folder / "a.png")
    while '"input/dogs"' not in json.dumps(comfyui.get("/object_info/TesseraImageFolder")):
        time.sleep(0.2)
    yield
    shutil.rmtree(folder)


def open_form(frontend):
    page = frontend.page
    form = page.locator(".tessera-new-run")
    if not form.is_visible():
        page.evaluate("app.extensionManager.sidebarTab.toggleSidebarTab('tessera.training')")
    form.locator("summary").click()
    expect(form.get_by_label("Model").get_by_role("option", name="Train a FLUX LoRA", exact=True)).to_be_attached()
    return form


@renderers("canvas")
def test_the_form_opens_a_filled_workflow_and_starts_it(dogs, frontend, comfyui, new_renderer):
    frontend.use_new_renderer(new_renderer)
    page = frontend.page
    form = open_form(frontend)
    models = form.get_by_label("Model").locator("option").all_inner_texts()
    assert "Train a Wan LoRA on clips" in models and "Train a Qwen-Image-Edit LoRA" not in models
    form.get_by_label("Model").select_option(label="Train a FLUX LoRA")
    form.get_by_label("Folder").select_option("input/dogs")
    form.get_by_label("Trigger word").fill("ohwx dog")
    preset = form.get_by_label("Preset").locator("option").nth(1).inner_text()
    form.get_by_label("Preset").select_option(preset)
    frontend.picture("new_lora", locator=page.locator(".tessera-runs"), themes=("dark", "light"))
    form.get_by_role("button", name="Only open").click()
    expect(page.locator(".tessera-runs")).to_contain_text("The workflow of dogs is open. Press Run to train.")
    values = page.evaluate(WIDGETS)
    folder, train = values["TesseraImageFolder"], values["TesseraTrainLora"]
    assert (folder["folder"], folder["trigger_words"]) == ("input/dogs", "ohwx dog")
    assert (train["output_name"], train["preset"]) == ("dogs", preset)
    assert values["CLIPTextEncode"]["text"] == "a photograph of ohwx dog"
    assert comfyui.get("/queue") == {"queue_running": [], "queue_pending": []}

    form.get_by_label("Name").fill("my dog")
    with page.expect_request(lambda request: request.url.endswith("/prompt")) as queued:
        form.get_by_role("button", name="Start").click()
    nodes = {node["class_type"]: node["inputs"] for node in queued.value.post_data_json["prompt"].values()}
    assert nodes["TesseraTrainLora"]["output_name"] == "my dog"
    assert nodes["TesseraImageFolder"]["trigger_words"] == "ohwx dog"
    expect(page.locator(".tessera-runs")).to_contain_text("my dog is in the queue.")


@renderers("canvas")
def test_the_form_says_which_file_is_missing_and_queues_nothing(frontend, comfyui, new_renderer):
    frontend.use_new_renderer(new_renderer)
    page = frontend.page
    file = comfyui.base / "models" / "diffusion_models" / "flux1-dev.safetensors"
    away = file.rename(file.with_suffix(".away"))
    try:
        form = open_form(frontend)
        form.get_by_label("Model").select_option(label="Train a FLUX LoRA")
        form.get_by_role("button", name="Start").click()
        expect(page.locator(".tessera-runs")).to_contain_text("Not in ComfyUI’s models: flux1-dev.safetensors.")
        assert comfyui.get("/queue") == {"queue_running": [], "queue_pending": []}
    finally:
        away.rename(file)


@renderers("canvas")
def test_a_model_of_clips_takes_a_folder_of_clips(frontend, comfyui, new_renderer):
    frontend.use_new_renderer(new_renderer)
    page = frontend.page
    form = open_form(frontend)
    form.get_by_label("Model").select_option(label="Train a Wan LoRA on clips")
    expect(form.get_by_label("Folder")).to_have_value("input/my_clips")
    form.get_by_label("Trigger word").fill("a red ball")
    form.get_by_role("button", name="Only open").click()
    expect(page.locator(".tessera-runs")).to_contain_text("is open. Press Run to train.")
    texts = page.evaluate("app.graph.nodes.filter((n) => n.type === 'CLIPTextEncode').map((n) => n.widgets[0].value)")
    assert "a red ball" in texts and any("blurred" in text for text in texts)  # the negative prompt stays
    assert page.evaluate(WIDGETS)["TesseraVideoFolder"]["trigger_words"] == "a red ball"

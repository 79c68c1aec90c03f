"""The pack's workflows in ComfyUI's list of templates and its blueprint, and each of them as the frontend opens it."""

import json

import pytest
from comfy_server import PACK
from PIL import Image

playwright = pytest.importorskip("playwright.sync_api")

NAMES = sorted(path.stem for path in (PACK / "workflows").glob("*.json"))
LEAST_ZOOM = 0.58
SCREEN = {"width": 1920, "height": 1200}
TITLES = json.loads((PACK / "locales" / "en" / "main.json").read_text(encoding="utf-8"))["templateWorkflows"]
OPEN = "app.extensionManager.command.execute('Comfy.BrowseTemplates')"


def test_every_workflow_has_a_title_with_its_number_a_description_and_a_card():
    for kind in ("template", "templateDescription"):
        for folder in TITLES[kind].values():
            assert sorted(folder) == NAMES
    titles = TITLES["template"]["tessera"].values()
    assert sorted(int(title.split()[0]) for title in titles) == list(range(len(NAMES)))
    for name in NAMES:
        with Image.open(PACK / "workflows" / f"{name}.jpg", formats=["JPEG"]) as card:
            assert card.size == (1280, 720)


def test_the_list_of_templates_shows_titles_in_their_order(frontend):
    frontend.page.set_viewport_size(SCREEN)
    frontend.page.evaluate(OPEN)
    frontend.page.get_by_text("Tessera: LoRA training").first.click()
    titles = sorted(TITLES["template"]["tessera"].values(), key=lambda title: int(title.split()[0]))
    playwright.expect(frontend.page.get_by_text(titles[0], exact=True)).to_be_visible()
    headings = frontend.page.locator("[data-testid^='template-workflow-'] h3").all_inner_texts()
    assert headings[:6] == titles[:6]
    frontend.picture("templates")
    assert frontend.crashes == []


def test_each_workflow_opens_legible_without_a_fault_and_equals_its_api_form(frontend):
    frontend.page.set_viewport_size(SCREEN)
    for name in NAMES:
        frontend.drop(workflow(name))
        assert frontend.page.evaluate("app.canvas.ds.scale") >= LEAST_ZOOM, name
        assert frontend.faults() == {}, name
        api = json.loads((PACK / "workflows" / "api" / f"{name}.json").read_text(encoding="utf-8"))
        for prompt in (graph_prompt := frontend.prompt(), api):
            for node in prompt.values():
                node.pop("_meta")
        assert graph_prompt == api, name
    assert frontend.crashes == []


def test_slots_of_two_experts_are_told_apart_and_keep_their_names(frontend):
    frontend.drop(workflow("compare_loras"))
    assert {"lora0", "low noise lora0"} <= set(labels_of(frontend, "TesseraCompareLoras", "inputs").values())
    frontend.drop(workflow("wan22_two_experts_lora"))
    labels = list(labels_of(frontend, "TesseraTrainLora", "outputs").items())[3:6]
    assert [label for _, label in labels] == ["lora (low noise)", "loss (low noise)", "path (low noise)"]
    assert [name for name, _ in labels] == ["lora_low_noise", "loss_low_noise", "path_low_noise"]


def workflow(name):
    return (PACK / "workflows" / f"{name}.json").read_text(encoding="utf-8")


def labels_of(frontend, kind, slots):
    """Labels of the inputs or outputs of the node of this type, by name: newer frontends leave out what is a name."""
    return frontend.page.evaluate(
        "([kind, slots]) => Object.fromEntries(app.graph.nodes.find((n) => n.type === kind)[slots]"
        ".map((slot) => [slot.name, slot.label ?? slot.localized_name ?? slot.name]))",
        [kind, slots],
    )


TRY_IT = ["CLIPTextEncode", "FluxGuidance", "LoraModelLoader", "TesseraImageFolder", "TesseraLoraNetwork"]
TRY_IT += ["TesseraOptimizer", "TesseraPrepareDataset", "TesseraSaveLora", "TesseraTrainLora", "TesseraTryItModels"]
TYPES = "() => app.graph.nodes.map((n) => n.type)"
OPENED = "() => window.app?.graph?.nodes?.some((n) => n.type === 'TesseraTryItModels')"
THUMBNAILS = "() => [...document.querySelectorAll('.tessera-tile img')].filter((i) => i.naturalWidth)"


def test_try_it_opens_from_the_list_with_its_pictures_and_without_a_fault(frontend):
    frontend.page.set_viewport_size(SCREEN)
    frontend.page.evaluate(OPEN)
    frontend.page.get_by_text("Tessera: LoRA training").first.click()
    frontend.page.get_by_text(TITLES["template"]["tessera"]["try_it"], exact=True).click()
    frontend.page.wait_for_function(OPENED)
    assert set(TRY_IT) <= set(frontend.page.evaluate(TYPES))
    frontend.page.wait_for_function(f"({THUMBNAILS})().length === 3")
    assert frontend.faults() == {}
    assert frontend.crashes == []


def test_try_it_opens_by_the_address_that_dev_serve_leads_to(frontend):
    frontend.page.goto(f"{frontend.server.url}/?template=try_it&source=tessera")
    frontend.page.wait_for_function(OPENED)
    assert set(TRY_IT) <= set(frontend.page.evaluate(TYPES)) and frontend.faults() == {}

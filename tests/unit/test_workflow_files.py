"""What a shared workflow carries for somebody who has none of the files yet."""

import json
from pathlib import Path

import pytest
from PIL import Image

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
UI = sorted(path.name for path in WORKFLOWS.glob("*.json"))


@pytest.mark.parametrize("name", UI)
def test_every_model_file_that_a_workflow_names_has_a_download_link_and_its_folder(name):
    nodes = json.loads((WORKFLOWS / name).read_text(encoding="utf-8"))["nodes"]
    named = {v for node in nodes for v in node.get("widgets_values") or [] if str(v).endswith(".safetensors")}
    links = [model for node in nodes for model in node.get("properties", {}).get("models", [])]
    assert named and named == {model["name"] for model in links}
    for model in links:
        assert model["url"].startswith("https://") and model["name"] in model["url"]
        assert model["directory"] in ("diffusion_models", "text_encoders", "vae")


@pytest.mark.parametrize("name", UI)
def test_every_workflow_has_a_thumbnail_that_can_be_read_and_an_api_form(name):
    with Image.open((WORKFLOWS / name).with_suffix(".jpg")) as picture:
        assert picture.width >= 1200 and picture.height >= 450
    prompt = json.loads((WORKFLOWS / "api" / name).read_text(encoding="utf-8"))
    assert all(node["class_type"] and isinstance(node["inputs"], dict) for node in prompt.values())


def test_there_is_a_workflow_to_share():
    assert "flux_lora.json" in UI

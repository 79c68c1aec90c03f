"""Every list of the models that train is the registry's: in the pages and in the texts of Train LoRA."""

import importlib.util
from pathlib import Path

from tessera.models.catalogue.registry import FAMILIES, titles, titles_with_releases
from tessera.models.native.facts.lookup import named_titles
from tessera.nodes.train.train_lora import TesseraTrainLora

TOOL = Path(__file__).resolve().parents[3] / "tools" / "model_lists.py"
spec = importlib.util.spec_from_file_location("model_lists", TOOL)
assert spec is not None and spec.loader is not None
model_lists = importlib.util.module_from_spec(spec)
spec.loader.exec_module(model_lists)


def test_the_pages_list_what_the_registry_holds():
    listing = naming = 0
    for page in model_lists.PAGES:
        text = page.read_text(encoding="utf-8")
        assert text == model_lists.filled(text, titles_with_releases()), f"{page.name}: run `python dev.py lists`"
        assert text == model_lists.filled(text, named_titles(), model_lists.NAMED), (
            f"{page.name}: `python dev.py lists`"
        )
        naming += len(model_lists.NAMED.findall(text))
        listing += all(
            family.title in "".join(match[0] for match in model_lists.LIST.finditer(text)) for family in FAMILIES
        )
    assert listing >= 2 and naming >= 2


def test_a_new_family_changes_each_list():
    text = "Trains <!-- models -->FLUX.1<!-- /models -->, in <!-- models --><!-- /models -->."
    names = "<!-- models -->A (b), C and D<!-- /models -->"
    assert model_lists.filled(text, ("A (b)", "C", "D")) == f"Trains {names}, in {names}."
    assert model_lists.filled(text, ("E", "F"), model_lists.NAMED) == text
    block = "<!-- named models --><!-- /named models -->"
    assert model_lists.filled(block, ("E", "F"), model_lists.NAMED) == block.replace("><", ">E and F<")


def test_train_lora_names_every_family():
    schema = TesseraTrainLora.define_schema()
    tooltip = next(item.tooltip for item in schema.inputs if item.id == "model")
    for title in titles():
        assert title in schema.description and title in tooltip

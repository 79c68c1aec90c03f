"""docs/models.md has a row for every model class of ComfyUI and says what its tests show, no more."""

import re
from types import SimpleNamespace

import comfy.supported_models
import pytest
from tessera.models.native.facts.lookup import NAMED as facts_by_name
from tiny.native import NAMED, ROWS
from with_pack import ROOT, load

model_table = load("model_table", ROOT / "tools" / "model_table.py")
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (own|A|B|C|–) \| (.+) \|$", re.MULTILINE)
TITLES = {"flux": "FLUX.1"}


def _page_text():
    return model_table.PAGE.read_text(encoding="utf-8")


def test_the_page_is_fresh():
    page = model_table.make_page()
    assert page.splitlines()[-1] in _page_text(), "ComfyUI's classes or ours changed: run `python dev.py models`"
    assert _page_text() == page, "run `python dev.py models`"


def test_the_page_has_a_row_for_every_class():
    rows = ROW.findall(_page_text())
    assert [name for name, *_ in rows] == [kind.__name__ for kind in comfy.supported_models.models]
    assert len(rows) == len(set(rows)) > 90


def test_a_tier_is_claimed_only_for_a_model_that_is_tested():
    tiers = {name: tier for name, _, tier, _ in ROW.findall(_page_text())}
    tested = {row.model: row.tier for row in ROWS}
    claimed = {name: tier for name, tier in tiers.items() if tier in "AB"}
    assert claimed == {name: tier for name, tier in tested.items() if tier in "AB" and name not in model_table.OWN}
    assert {row.model for row in NAMED} == {name for name, tier in claimed.items() if tier == "A"}


def test_refused_models_say_why():
    refused = {name: notes for name, _, tier, notes in ROW.findall(_page_text()) if tier == "–"}
    untrained = {row.model: row.left_out["training"] for row in ROWS if row.tier == "–"}
    assert refused == model_table.refused() | untrained
    assert {"audio", "3D", "detection", "upscales", "refines"} <= set(refused.values())


def test_the_tables_speak_of_no_class_twice():
    names = [*model_table.OWN, *model_table.SHARED, *model_table.refused(), *{row.model for row in ROWS}]
    assert {name for name in names if names.count(name) > 1} <= model_table.OWN.keys()
    assert set(names) == model_table.TITLES.keys()


def test_every_release_of_a_named_model_says_what_to_load_and_how_it_is_sampled():
    text = _page_text()
    for facts in facts_by_name:
        for release in facts.releases:
            (line,) = (line for line in text.splitlines() if f"`{release.file}`" in line)
            assert line.startswith(f"| {release.title}") and ("distilled" in line) == release.distilled
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            assert all(f"`{name}`" in cells[2] for name in facts.encoders)
            assert facts.vae in cells[3] and (facts.vae or release.checkpoint or cells[3] == "`pixel_space`")
            assert [float(cell) for cell in cells[4:7]] == [
                facts.megapixels, release.sampling.steps, release.sampling.cfg
            ]  # fmt: skip
            assert cells[7] == f"{release.sampling.sampler}, {release.sampling.scheduler}"


class NewInComfy:
    pass


def test_a_class_that_is_new_asks_for_its_tier():
    with pytest.raises(ValueError, match=r"NewInComfy is new in ComfyUI.*model_table\.py"):
        list(model_table.table([NewInComfy], ROWS, TITLES))


def test_the_hash_changes_with_the_classes_of_either():
    import comfy.supported_models as known

    row = SimpleNamespace(name="a", model="Flux", tier="A", batches=True, audio=None, left_out={})
    marks = {
        model_table.fingerprint([known.Flux], [row], TITLES),
        model_table.fingerprint([known.Flux, known.SDXL], [row], TITLES),
        model_table.fingerprint([known.Flux], [], TITLES),
        model_table.fingerprint([known.Flux], [row], {"flux": "FLUX"}),
    }
    assert len(marks) == 4

"""Files of the pack that the registry and GitHub read: pyproject.toml, its pictures, workflows and issue templates."""

import re
import struct
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")  # Python 3.11
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PLACEHOLDER = "https://github.com/OWNER/tessera"


def size_of(link: str) -> tuple[int, int]:
    """Width and height of the PNG in the repository that an address leads to."""
    path = ROOT / link.partition("/tessera/main/")[2]
    assert path.suffix == ".png"
    return struct.unpack(">II", path.read_bytes()[16:24])


def test_the_registry_finds_what_it_shows():
    project, comfy = PACKAGE["project"], PACKAGE["tool"]["comfy"]
    assert {"Repository", "Documentation", "Bug Tracker"} <= project["urls"].keys()
    assert re.fullmatch(r"[a-z][a-z0-9-]*", project["name"]) and re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert comfy["PublisherId"] and comfy["DisplayName"] and project["description"]
    kinds = {classifier.partition(" ::")[0] for classifier in project["classifiers"]}
    assert {"Environment", "License", "Operating System"} <= kinds
    width, height = size_of(comfy["Icon"])
    assert width == height <= 400
    width, height = size_of(comfy["Banner"])
    assert width * 9 == height * 21


def test_the_address_is_in_pyproject_alone_and_is_filled_in_before_publishing():
    files = [path for path in ROOT.rglob("*") if path.suffix in (".md", ".yml", ".toml", ".py", ".js", ".json")]
    placed = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if "tests" not in path.relative_to(ROOT).parts
        and "OWNER/" in path.read_text(encoding="utf-8", errors="replace")
    }
    assert placed <= {"pyproject.toml", ".github/workflows/publish.yml"}
    workflow = (ROOT / ".github/workflows/publish.yml").read_text(encoding="utf-8")
    guarded = re.search(r'grep -q "(.+)" pyproject.toml', workflow)
    assert guarded and guarded[1] in PLACEHOLDER + "/"
    assert workflow.index(guarded[0]) < workflow.index("Comfy-Org/publish-node-action")


def test_the_changelog_has_the_version():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {PACKAGE['project']['version']}\n" in changes


def test_a_report_on_training_has_to_bring_the_summary():
    template = ROOT / ".github/ISSUE_TEMPLATE/training.yml"
    text = template.read_text(encoding="utf-8")
    field = text.partition("id: summary")[2].partition("- type:")[0]
    assert "summary.json" in field and "required: true" in field

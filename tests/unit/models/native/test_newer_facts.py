"""Files and sampling of models newer than the pinned ComfyUI are those of its later templates, kept as data."""

import json
from dataclasses import astuple
from pathlib import Path

from tessera.models.native.facts.newer import BY_RULE, NEWER

DATA = Path(__file__).resolve().parents[3] / "data" / "newer_templates.json"


def test_every_row_has_the_files_and_the_sampling_of_its_template():
    templates = json.loads(DATA.read_text(encoding="utf-8"))["templates"]
    rows = {
        release.template: [release.file, facts.vae, *facts.encoders, facts.clip_type, *astuple(release.sampling)]
        for facts in (*NEWER, *BY_RULE)
        for release in facts.releases
    }
    assert rows.keys() == templates.keys()
    for name, row in rows.items():
        # A template with sigmas of its own names no scheduler.
        assert row == [*templates[name][:-1], templates[name][-1] or "simple"], name

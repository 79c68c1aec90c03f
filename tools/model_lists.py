"""Write the lists of models that train into the pages that have them, from the registry of families.

Run: python dev.py lists
The families with a forward in the pack are between the comments `<!-- models -->` and `<!-- /models -->`, the names of
others, which train with ComfyUI's forward, between `<!-- named models -->` and `<!-- /named models -->`.
"""

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "docs" / "limits.md", *sorted((ROOT / "nodes" / "web" / "docs").glob("*.md")))
LIST, NAMED = (re.compile(rf"(<!-- {mark} -->).*?(<!-- /{mark} -->)", re.DOTALL) for mark in ("models", "named models"))


def filled(page: str, models: Sequence[str], marked_list: re.Pattern[str] = LIST) -> str:
    """Replace each list in the text of a page."""
    *first, last = models
    return marked_list.sub(lambda marks: f"{marks[1]}{', '.join(first)} and {last}{marks[2]}", page)


def main(comfyui: str) -> None:
    sys.path.insert(0, comfyui)
    from comfy.cli_args import args

    args.cpu = True
    spec = importlib.util.spec_from_file_location(
        "tessera", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["tessera"] = pack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)
    models = importlib.import_module("tessera.models.catalogue.registry").titles_with_releases()
    named_titles = importlib.import_module("tessera.models.native.facts.lookup").named_titles()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := filled(filled(text, models), named_titles, NAMED)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"Wrote the list of models into {page.relative_to(ROOT)}.")


if __name__ == "__main__":
    main(sys.argv[1])

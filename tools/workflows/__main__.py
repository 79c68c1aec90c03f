"""Writes the shared training workflows, `workflows/*.json` and `workflows/api/*.json`, from their descriptions beside
this file, and gives those that were laid out by hand the inputs that nodes have got since.

Run: python tools/workflows http://127.0.0.1:8188
The address is that of a ComfyUI with this pack, such as `python dev.py serve` starts; it tells what inputs nodes have.
A file with what its `/object_info` answered does as well.
Thumbnails are pictures of the frontend with a workflow open, 1200 pixels wide or more.
"""

import json
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import chroma
import flux
import native
import qwen_image
import wan
from graph import Graph, bring_up_to_date

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
FAMILIES = (wan, qwen_image, flux, chroma, native)
DESCRIPTIONS: list[Callable[[Graph], None]] = [describe for family in FAMILIES for describe in family.DESCRIPTIONS]


def main(source: str) -> None:
    if source.startswith("http"):
        with urllib.request.urlopen(f"{source.rstrip('/')}/object_info") as answer:
            object_info = json.load(answer)
    else:
        object_info = json.loads(Path(source).read_text(encoding="utf-8"))
    for describe in DESCRIPTIONS:
        graph = Graph(describe.__name__, object_info)
        describe(graph)
        graph.write(WORKFLOWS)
    described = {describe.__name__ for describe in DESCRIPTIONS}
    for path in WORKFLOWS.glob("*.json"):
        if path.stem not in described:
            bring_up_to_date(path, object_info)


if __name__ == "__main__":
    main(*sys.argv[1:])

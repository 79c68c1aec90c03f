"""Write the shared workflows, `workflows/*.json` and `workflows/api/*.json`, from `descriptions/`.

Run: python tools/workflows http://127.0.0.1:8188
The address is that of a ComfyUI with this pack, such as `python dev.py serve` starts; it describes the inputs of nodes.
A file with the answer of its `/object_info` works as well. Thumbnails are drawn by `python tools/workflows/cards.py`.
"""

import json
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

from descriptions import chroma, compiled, flux, native, prepare_folder, qwen_image, try_it, wan
from graph import Graph

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
FAMILIES = (try_it, wan, qwen_image, flux, chroma, native, compiled, prepare_folder)
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


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Cost of buckets: the mean part of a picture lost to crop at 1 megapixel, over the 10,000 sizes of tests/data.

Run: python benchmarks bucket_loss > benchmarks/results/bucket_loss.md
Needs numpy only; the result is the same on every machine.
"""

import argparse
import csv
import importlib.util
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "data" / "aspect_ratios.csv"


def load_planner():
    """The pack's planner; the pack is loaded by path, since its root never goes on sys.path."""
    spec = importlib.util.spec_from_file_location(
        "tessera", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    sys.modules["tessera"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["tessera"])
    return import_module("tessera.data.buckets.planner")


def read_table(path: Path = TABLE) -> tuple[list[tuple[int, int]], list[int]]:
    """The (height, width) of each row and its number of pictures."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [(int(r["height"]), int(r["width"])) for r in rows], [int(r["count"]) for r in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megapixels", type=float, default=1.0)
    parser.add_argument("--pixels-per-token", type=int, default=16, help="along a side; 16 for FLUX")
    args = parser.parse_args()
    tokens = load_planner()
    sizes, counts = read_table()
    common = {"megapixels": args.megapixels, "pixels_per_token": args.pixels_per_token, "weights": counts}

    rows = []
    for name, graphs in (("one", 1), ("up to two", 2), ("up to three", 3)):
        plan = tokens.plan_buckets(sizes, max_graphs=graphs, **common)
        rows.append((f"Tessera, whole grids, {name}", plan.token_counts, len(plan.token_counts), plan.mean_crop))
    plan = tokens.plan_buckets(sizes, fit=tokens.RAGGED_EDGE, **common)
    rows.append(("Tessera, ragged edge", plan.token_counts, len(plan.token_counts), plan.mean_crop))
    for step in (64, 32, 16):
        crop, graphs = tokens.equal_area_crop(sizes, step=step, **common)
        rows.append((f"Equal area in steps of {step} pixels", (), graphs, crop))

    print("# What buckets cost\n")
    print(
        f"{sum(counts):,} pictures of {len(sizes)} sizes (`tests/data/aspect_ratios.csv`), "
        f"{args.megapixels:g} megapixel, {args.pixels_per_token} pixels per token. "
        "Each token count is one compiled graph per kind of block.\n"
    )
    print("| buckets | token counts | mean crop | N |")
    print("|---|---:|---:|---|")
    for name, used, graphs, crop in rows:
        print(f"| {name} | {graphs} | {crop:.2%} | {', '.join(map(str, used)) or 'as they fall'} |")
    print("\nMade by `python benchmarks bucket_loss > benchmarks/results/bucket_loss.md`.")


if __name__ == "__main__":
    main()

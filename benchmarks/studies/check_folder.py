"""Time of Check Folder over 2,000 photographs of one megapixel, the first time and the second.

Run: COMFYUI_PATH=… python benchmarks check_folder > benchmarks/results/check_folder.md
Needs ComfyUI's environment and 1 GB in the folder for temporary files. Seconds are those of one machine.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from comfyui import set_up_comfyui
from PIL import Image, ImageChops

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "tiny" / "data"))
from photographs import make_photograph

SIDES = (1152, 896)
LARGE = (2048, 1536)
SOURCES = 10


def write_pictures(folder: Path, count: int) -> int:
    """Write parts of a few large photographs, as JPEG and every fourth as PNG. Return their bytes."""
    rng = random.Random(0)
    grain = Image.merge("RGB", [Image.effect_noise(LARGE, 10) for _ in range(3)])
    sources = [ImageChops.add(make_photograph(seed + 1, *LARGE), grain, offset=-128) for seed in range(SOURCES)]
    folder.mkdir(parents=True)
    for number in range(count):
        left, top = rng.randrange(LARGE[0] - SIDES[0]), rng.randrange(LARGE[1] - SIDES[1])
        part = sources[number % SOURCES].crop((left, top, left + SIDES[0], top + SIDES[1]))
        path = folder / f"{number:05}.{'png' if number % 4 == 0 else 'jpg'}"
        part.save(path, **({"compress_level": 3} if number % 4 == 0 else {"quality": 92}))
        path.with_suffix(".txt").write_text(f"photograph {number}")
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=2000)
    args = parser.parse_args()
    set_up_comfyui("cpu")
    from tessera.data.cache import Cache
    from tessera.data.layouts.kinds import IMAGES
    from tessera.data.layouts.layout import LayoutRequest, read_layout
    from tessera.data.media import images
    from tessera.data.review.check import CheckOptions, check_folder

    with tempfile.TemporaryDirectory() as base:
        size = write_pictures(Path(base, "photos"), args.pictures)
        rows = []
        for text in ("the first check", "again in the same ComfyUI", "again after a restart of ComfyUI"):
            if "restart" in text:
                images._inspect.cache_clear()
            begin, used = time.perf_counter(), time.process_time()
            layout = read_layout(LayoutRequest(Path(base, "photos"), IMAGES))
            cache = Cache(Path(base, "cache"))
            check_folder(layout, cache, CheckOptions(), lambda *_: None, lambda: None)
            rows.append((text, time.perf_counter() - begin, time.process_time() - used))
    print("# Check Folder\n")
    print(
        f"{args.pictures:,} photographs made by code, {SIDES[0]} x {SIDES[1]} pixels, a quarter of them PNG "
        f"({size / 1e6:,.0f} MB), on {os.cpu_count()} cores with a load of {os.getloadavg()[0]:.0f} by other programs: "
        "the processor counts, and two idle cores take about half of its seconds.\n"
    )
    print("| check | seconds | of the processor |\n|---|---:|---:|")
    for text, clock, processor in rows:
        print(f"| {text} | {clock:.1f} | {processor:.1f} |")
    each = rows[0][2] / args.pictures
    print(
        f"\nA picture takes {1000 * each:.0f} ms of the processor, so 2,000 take {2000 * each:.0f} s, or "
        f"{1000 * each:.0f} s on two idle cores."
    )
    print("\nMade by `python benchmarks check_folder > benchmarks/results/check_folder.md`.")


if __name__ == "__main__":
    main()

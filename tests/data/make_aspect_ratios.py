"""Writes aspect_ratios.csv: 10,000 picture sizes with the spread of aspect ratios that people's folders have.

No survey stands behind the shares; they are an assumption, fixed so that figures can be compared: 7,200 pictures as
cameras, phones, screens, film and scanners make them, 2,000 cropped by hand a little off one of those, and 800 cropped
freely. The table is the reference, and this file says how it was made. Run: python tests/data/make_aspect_ratios.py
"""

import math
import random
from collections import Counter
from pathlib import Path

# (width, height): how many
AS_MADE = {
    (6000, 4000): 1500,
    (4000, 6000): 900,
    (4032, 3024): 900,
    (3024, 4032): 1100,
    (1920, 1080): 650,
    (1080, 1920): 350,
    (1080, 1080): 500,
    (1080, 1350): 450,
    (1350, 1080): 100,
    (1170, 2532): 200,
    (2532, 1170): 40,
    (1920, 1200): 100,
    (1998, 1080): 60,
    (2048, 858): 80,
    (2480, 3508): 120,
    (3508, 2480): 40,
    (2000, 1000): 60,
    (3440, 1440): 50,
}
CROPPED_A_LITTLE, CROPPED_FREELY = 2000, 800
LONG_SIDE, STEP = 1600, 10


def cropped(aspect: float) -> tuple[int, int]:
    """A size of about this aspect (width / height): the long side fixed, the short one in steps, to keep rows few."""
    short = round(LONG_SIDE * min(aspect, 1 / aspect) / STEP) * STEP
    return (LONG_SIDE, short) if aspect >= 1 else (short, LONG_SIDE)


def main() -> None:
    rng = random.Random(20)
    table = Counter(AS_MADE)
    sizes, shares = list(AS_MADE), list(AS_MADE.values())
    for width, height in rng.choices(sizes, shares, k=CROPPED_A_LITTLE):
        table[cropped(width / height * math.exp(rng.gauss(0, 0.06)))] += 1
    for _ in range(CROPPED_FREELY):
        log_aspect = max(-math.log(3), min(math.log(3), rng.gauss(0, 0.4)))
        table[cropped(math.exp(log_aspect))] += 1
    assert table.total() == 10_000
    lines = [
        "# 10,000 picture sizes: width,height,count. Made by make_aspect_ratios.py beside this file; do not edit.",
        "width,height,count",
        *(f"{width},{height},{count}" for (width, height), count in sorted(table.items())),
    ]
    Path(__file__).with_name("aspect_ratios.csv").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""Simulate a training step on 2 to 64 devices: pure arithmetic from a step on one, bytes, and the speed of links.

    python benchmarks many_cards [--step SECONDS] [--lora-mb MB] [--write]

--step is a measured `seconds_per_step` of one picture on one card in place of the priced one, --lora-mb the megabytes
of the trained weights in fp32. --write writes benchmarks/results/many_cards.md. Standard library only.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counted.cost import CARDS

RESULTS = Path(__file__).parents[1] / "results"
PAGE = RESULTS / "many_cards.md"
COUNTED = RESULTS / "counted.md"
MEETINGS = RESULTS / "meetings.json"
RANKS = (1, 2, 4, 8, 16, 32, 64)
ENOUGH = 0.8  # of the speed that as many devices would have if they shared at no cost
ON_A_HOST = 8
BATCH = 64  # pictures of a step, which all of RANKS can share
LORA = 310e6  # bytes of a rank-16 LoRA on every Linear of FLUX.1 in fp32, see docs/many_cards.md
BASE = {"bf16": 23.8e9, "fp8": 11.9e9}  # bytes of FLUX.1's 11.9 billion weights
PASSES = 2  # each block's weights are needed forward and once more backward
UPDATE = 0.002  # seconds of clip, AdamW and casts on an H100, by counted.md; the same on every device
SPREAD = 0.01  # standard deviation of a device's step, as a part of it


@dataclass(frozen=True)
class Link:
    """speed: bytes a second between two devices in one direction; latency: seconds of one message."""

    speed: float
    latency: float
    source: str


LINKS = {
    "NVLink 4": Link(360e9, 5e-6, "450 GB/s by the H100's data sheet, 80 % of it"),
    "PCIe 5 x16": Link(50e9, 15e-6, "63 GB/s by the standard, 80 % of it"),
    "PCIe 4 x16": Link(12e9, 25e-6, "31.5 GB/s by the standard, through host memory: 40 % of it"),
    "100 Gbit/s Ethernet": Link(11e9, 50e-6, "12.5 GB/s, 90 % of it"),
    "10 Gbit/s Ethernet": Link(1.1e9, 50e-6, "1.25 GB/s, 90 % of it"),
}


@dataclass(frozen=True)
class Step:
    """Seconds of a step on one of several devices, by purpose."""

    compute: float
    sums: float
    waiting: float
    update: float
    gather: float = 0.0

    @property
    def seconds(self) -> float:
        """Add up a step: gathers overlap the computation; the sum, the update and the wait for the slowest follow
        it."""
        return max(self.compute, self.gather) + self.sums + self.waiting + self.update

    @property
    def reason(self) -> str:
        """Name the largest cost other than computing."""
        parts = {"sum of the gradients": self.sums, "slowest device": self.waiting, "update": self.update}
        parts["gather of the base"] = max(0.0, self.gather - self.compute)
        return max(parts, key=lambda name: parts[name])


def all_reduce(size: float, ranks: int, link: Link) -> float:
    """Seconds of a ring's sum of `size` bytes: 2 (n − 1) messages of one n-th each (Patarasuk and Yuan, 2009)."""
    return 2 * (ranks - 1) * (size / ranks / link.speed + link.latency)


def all_gather(size: float, ranks: int, link: Link, blocks: int = 57) -> float:
    """Seconds in which a ring gathers `size` bytes, of which each of `ranks` has one n-th, block by block."""
    return (ranks - 1) * (size / ranks / link.speed + blocks * link.latency)


def slowest(ranks: int) -> float:
    """Expected excess of the slowest of n equal devices, as a part of a step: SPREAD · √(2 ln n), an upper bound."""
    return SPREAD * math.sqrt(2 * math.log(ranks))


def step(picture: float, ranks: int, link: Link, lora: float = LORA, base: float = 0.0, batch: int = BATCH) -> Step:
    """Simulate a step of `batch` pictures on `ranks` devices.

    picture: seconds of one picture on one device. lora: bytes of the gradients.
    base: bytes of the model's weights if each device holds a shard of them (`shard`), else 0.
    """
    samples = batch // ranks
    compute = samples * picture
    if ranks == 1:
        return Step(compute, 0.0, 0.0, UPDATE)
    gather = samples * PASSES * all_gather(base, ranks, link) if base else 0.0
    return Step(compute, all_reduce(lora, ranks, link), slowest(ranks) * compute, UPDATE, gather)


def efficiency(picture: float, ranks: int, link: Link, **options: float) -> float:
    """Speed of n devices over n times the speed of one."""
    return step(picture, 1, link).seconds / ranks / step(picture, ranks, link, **options).seconds


def priced(card: str, way: str) -> float:
    """Seconds of FLUX.1's blocks at 1024² with a LoRA by the counted page, at the rates of a card.

    way: tensors kept for backward, as the page names it.
    """
    row = f"| flux 1024² | {way} |"
    lines = COUNTED.read_text("utf-8").splitlines()
    columns = next(line for line in lines if line.startswith(row) and line.count("|") == 10).split("|")
    products, attention, *other_seconds = (float(column) for column in columns[3:8])
    h100, target = CARDS["H100"], CARDS[card]
    return (products + attention) * h100.products / target.products + sum(
        other_seconds
    ) * h100.bandwidth / target.bandwidth


def limit(picture: float, link: Link, numbers: tuple[int, ...], **options: float) -> str:
    """Say from how many devices on less than ENOUGH of their speed is left, and why."""
    for ranks in numbers:
        if efficiency(picture, ranks, link, **options) < ENOUGH:
            return f"{ranks}: {step(picture, ranks, link, **options).reason}"
    return f"not up to {numbers[-1]}"


def links_of(card: str) -> list[str]:
    """Name the links that a card may have."""
    return [name for name in LINKS if not (card.startswith("RTX") and name in ("NVLink 4", "PCIe 5 x16"))]


def table(picture: float, names: list[str], ranks: tuple[int, ...], **options: float) -> Iterator[str]:
    yield "| link | " + " | ".join(str(n) for n in ranks) + f" | below {ENOUGH:.0%} from |"
    yield "| --- |" + " ---: |" * len(ranks) + " --- |"
    for name in names:
        cells = []
        for n in ranks:
            simulated = step(picture, n, LINKS[name], **options)
            cells.append(f"{simulated.seconds:.2f} ({efficiency(picture, n, LINKS[name], **options):.0%})")
        yield f"| {name} | " + " | ".join(cells) + f" | {limit(picture, LINKS[name], ranks, **options)} |"


def meetings(facts: Mapping[str, Any]) -> Iterator[str]:
    """Describe the meetings before the sums, as measured by `meetings.py`."""
    yield (
        "Not counted in these tables: before each sum the devices meet by one key of torch's store. "
        f"`python benchmarks meetings --write` measured it with processes that do nothing else, {facts['meetings']} "
        "meetings each: milliseconds from when the last one came to when the last one left, and requests to the store "
        f"by all of them. All ran on {facts['cores']} cores ({facts['processor']}, torch {facts['torch']}), beside "
        f"other programs (a load of {facts['load']} when it began), so the times are longer than they need be: more "
        "processes than cores wait for a core as well, which devices with cores of their own do not. A network between "
        "hosts would come on top. Where all come at once the requests grow faster than the devices, since each writes "
        "the key anew when another one came first; devices that come one after another, as they do in training, pay "
        "less."
    )
    spreads = sorted({row["spread"] for row in facts["rows"]})
    names = ["all come at once" if not spread else f"they come within {spread:g} s" for spread in spreads]
    yield ""
    yield "| devices | " + " | ".join(f"{name}: median (worst) | requests" for name in names) + " |"
    yield "| ---: |" + " ---: | ---: |" * len(spreads)
    for ranks in sorted({row["ranks"] for row in facts["rows"]}):
        cells = []
        for spread in spreads:
            row = next(row for row in facts["rows"] if (row["ranks"], row["spread"]) == (ranks, spread))
            cells += [f"{row['median'] * 1e3:.1f} ({row['worst'] * 1e3:.1f})", f"{row['requests']:.0f}"]
        yield f"| {ranks} | " + " | ".join(cells) + " |"


def page(pictures: dict[str, float], lora: float, is_measured: bool) -> str:
    """Write the page. pictures: seconds of one picture by card."""
    source = "measured, as it was given" if is_measured else "priced by the counts of [counted.md](counted.md)"
    lines = [
        "# A step on 2 to 64 devices, simulated",
        "",
        "    python benchmarks many_cards --write",
        "",
        "Arithmetic, no measurement on several cards: nothing here has run on more than CPUs. The formulas "
        "stand in the "
        "script, and a test holds them.",
        "",
        "| figure | value | from |",
        "| --- | ---: | --- |",
        *(f"| a picture of 1024², FLUX.1, {card} | {seconds:.3f} s | {source} |" for card, seconds in pictures.items()),
        f"| trained weights in fp32, summed once a step | {lora / 1e6:.0f} MB | counted: rank 16 on every Linear |",
        *(f"| the base in {name} | {size / 1e9:.1f} GB | 11.9 billion weights |" for name, size in BASE.items()),
        f"| clip, AdamW and casts | {UPDATE * 1e3:.0f} ms | priced, counted.md |",
        f"| spread of a device's step | {SPREAD:.0%} | assumed |",
        *(
            f"| {name} | {link.speed / 1e9:g} GB/s, {link.latency * 1e6:.0f} µs | assumed: {link.source} |"
            for name, link in LINKS.items()
        ),
        "",
        "## Plain data parallel",
        "",
        f"Seconds of a step of {BATCH} pictures, and in brackets the part of n times one card's speed. Links "
        "are the slowest "
        f"on the way: above {ON_A_HOST} devices that is the network between hosts.",
    ]
    for card, picture in pictures.items():
        lines += ["", f"### {card}", "", *table(picture, links_of(card), RANKS[1:], lora=lora)]
    lines += [
        "",
        "The sum takes the same time however many pictures a device computes, and on any number of devices "
        "about twice the "
        "bytes over the link's speed. So it stops scaling where a device's pictures take no longer than that: "
        "with fewer "
        "pictures to a device, a faster card, or a slower link. `gradient_accumulation` raises the pictures of "
        "a step, but "
        "is another run. The wait for the slowest device grows with the root of a logarithm only.",
        "",
        *meetings(json.loads(MEETINGS.read_text("utf-8"))),
        "",
        "## `shard`: each device keeps its part of the base",
        "",
        f"Up to {ON_A_HOST} devices of a host. Each micro-batch, here of one picture, gathers every block "
        f"{PASSES} times, "
        "less what a device has itself, beside the computation; what does not fit behind it is waited for. "
        "Ethernet stands "
        "here to show why hosts do not share a base.",
    ]
    for card, picture in pictures.items():
        for name, size in BASE.items():
            host_ranks = tuple(n for n in RANKS if 1 < n <= ON_A_HOST)
            lines += [
                "",
                f"### {card}, base in {name}",
                "",
                *table(picture, links_of(card), host_ranks, lora=lora, base=size),
            ]
    lines += [
        "",
        "A gather moves (n − 1)/n of the base for each pass of each micro-batch, so unlike the sum it does not "
        "get less "
        "with more pictures in a step; more pictures in one micro-batch share it. It hides behind the "
        "computation where "
        "twice the base over the link's speed is less than a micro-batch takes. Over 10 Gbit/s it never does here.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, help="measured seconds of one picture on one card")
    parser.add_argument("--lora-mb", type=float, default=LORA / 1e6, help="trained weights in fp32")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.step is None:
        text = page({"H100": priced("H100", "none"), "RTX 4090": priced("RTX 4090", "full")}, args.lora_mb * 1e6, False)
    else:
        text = page({"this card": args.step}, args.lora_mb * 1e6, True)
    if args.write:
        PAGE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

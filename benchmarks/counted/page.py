"""The page of the counts: tables of kernels and bytes, their price, and the same before and after a change.

Counts are as `counted.json` holds them: rows → blocks → graphs of each way of keeping → kernels, each line with kind,
name, launches, bytes, FLOP, bytes moved and cycles of an SM.
"""

from collections.abc import Iterator
from typing import Any

from figures import markdown_table

from counted.cost import CARDS, rates, seconds_of

NONE = "none"
EAGER = "eager"
FULL = "full"
COLUMNS = (("products", ("product",)), ("attention", ("attention", "attention_backward")),
           ("thin products", ("thin",)), ("other kernels", ("triton", "other")), ("copies", ("copy",)))  # fmt: skip
Block = dict[str, Any]
Rows = dict[str, list[Block]]


def launches(graph: dict[str, Any], *kinds: str) -> int:
    """Launches of a graph, or of some kinds."""
    return sum(line[2] for line in graph["kernels"] if not kinds or line[0] in kinds)


def size(graph: dict[str, Any], *kinds: str) -> int:
    """Bytes that a graph's kernels read and write, or those of some kinds."""
    return sum(line[3] for line in graph["kernels"] if not kinds or line[0] in kinds)


def ways(blocks: list[Block]) -> list[str]:
    """Ways of keeping that a row has: as counted, and full recompute, which runs the forward of `none` twice."""
    return [*blocks[0]["graphs"], FULL]


def graphs_of(block: Block, way: str) -> list[dict[str, Any]]:
    """The graphs that a step runs of one block."""
    if way == EAGER:
        return [block["eager"]["forward"], block["eager"]["backward"]]
    parts = block["graphs"][NONE if way == FULL else way]
    return [parts["forward"]] * (1 + (way == FULL)) + [parts["backward"]]


def seconds(blocks: list[Block], way: str, card: str = "H100") -> list[float]:
    """Seconds of a step's blocks: of products, attention, thin products, all others, copies, and the sum."""
    return seconds_at(blocks, way, rates(card))


def seconds_at(blocks: list[Block], way: str, card_rates: Any) -> list[float]:
    """`seconds` at rates of any card."""
    sums = [0.0] * len(COLUMNS)
    for block in blocks:
        lines = [line for graph in graphs_of(block, way) for line in graph["kernels"]]
        for place, (_, kinds) in enumerate(COLUMNS):
            sums[place] += block["count"] * sum(seconds_of(line, card_rates) for line in lines if line[0] in kinds)
    return [*sums, sum(sums)]


def kept_bytes(blocks: list[Block], way: str) -> int:
    """Bytes that a step keeps for backward with a way of keeping."""
    return sum(block["count"] * graphs_of(block, way)[0]["kept"] for block in blocks)


def step_launches(blocks: list[Block], way: str, *kinds: str) -> int:
    """Launches of a step's blocks, or of some kinds."""
    return sum(block["count"] * launches(graph, *kinds) for block in blocks for graph in graphs_of(block, way))


def _counted_lines(rows: Rows) -> Iterator[list[str]]:
    for name, blocks in rows.items():
        for block in blocks:
            for way in (*block["graphs"], EAGER):
                graphs = graphs_of(block, way)
                cells = [f"{name}, {block['count']} {block['kind']}", way]
                for graph in graphs:
                    other_kernels, products = launches(graph, "triton", "other"), launches(graph, "product", "thin")
                    attention = launches(graph, "attention", "attention_backward")
                    cells += [f"{other_kernels} + {products} + {attention}", f"{size(graph) / 1e9:.2f}"]
                yield [*cells, f"{graphs[0]['kept'] / 1e6:.0f}"]


def counts_table(rows: Rows) -> str:
    return markdown_table(
        ("block", "kept for backward", "forward: own + products + attention", "GB",
         "backward: own + products + attention", "GB", "MB kept"),
        list(_counted_lines(rows)),
    )  # fmt: skip


def priced(rows: Rows, card: str = "H100") -> str:
    """Seconds of a step's blocks on a card, by kinds of kernels."""
    lines = [
        [name, f"{way}{' *' * (not _complete(blocks, way))}", *(f"{part:.3f}" for part in seconds(blocks, way, card)),
         str(step_launches(blocks, way))]
        for name, blocks in rows.items()
        for way in (*ways(blocks), EAGER)
    ]  # fmt: skip
    return markdown_table(
        ("model", "kept for backward", *(name for name, _ in COLUMNS), "sum, seconds", "launches"), lines
    )


def _complete(blocks: list[Block], way: str) -> bool:
    """Return whether copies, bytes moved and cycles were counted too."""
    return all(len(line) > 5 for block in blocks for graph in graphs_of(block, way) for line in graph["kernels"])


def cards_table(rows: Rows) -> str:
    """Seconds of a step's blocks on each card."""
    lines = [
        [name, way, *(f"{seconds(blocks, way, card)[-1]:.2f}" for card in CARDS)]
        for name, blocks in rows.items()
        for way in (NONE, FULL)
    ]
    return markdown_table(("model", "kept for backward", *CARDS), lines)


def _compared_lines(old_rows: Rows, new_rows: Rows) -> Iterator[list[str]]:
    for name, blocks in new_rows.items():
        for block, old in zip(blocks, old_rows.get(name, []), strict=False):
            for way in (way for way in (*block["graphs"], EAGER) if way == EAGER or way in old["graphs"]):
                cells = [f"{name}, {block['count']} {block['kind']}", way]
                for old_graph, new_graph in zip(graphs_of(old, way), graphs_of(block, way), strict=True):
                    cells += [
                        f"{launches(old_graph)} → {launches(new_graph)}",
                        f"{size(old_graph) / 1e9:.2f} → {size(new_graph) / 1e9:.2f}",
                    ]
                old_graph, new_graph = graphs_of(old, way)[0], graphs_of(block, way)[0]
                yield [*cells, f"{old_graph['kept'] / 1e6:.0f} → {new_graph['kept'] / 1e6:.0f}"]


def compared(old_rows: Rows, new_rows: Rows, card: str = "H100") -> str:
    """Launches, bytes and seconds of the same rows before and after a change."""
    header = ("block", "kept for backward", "forward: launches", "GB", "backward: launches", "GB", "MB kept")
    price = [
        [name, way, *(f"{old_value:.3f} → {new_value:.3f}" for old_value, new_value in zip(old, new, strict=True)),
         f"{step_launches(old_rows[name], way)} → {step_launches(blocks, way)}"]
        for name, blocks in new_rows.items() if name in old_rows
        for way in (*ways(blocks), EAGER) if way in (*ways(old_rows[name]), EAGER)
        for old, new in [(seconds(old_rows[name], way, card), seconds(blocks, way, card))]
    ]  # fmt: skip
    titles = ("model", "kept for backward", *(name for name, _ in COLUMNS), "sum, seconds", "launches")
    return f"{markdown_table(header, list(_compared_lines(old_rows, new_rows)))}\n\n{markdown_table(titles, price)}"


def _longest(blocks: list[Block], limit: int) -> Iterator[list[str]]:
    totals: dict[str, list[float]] = {}
    for block in blocks:
        for name, graph in block["graphs"][NONE].items():
            for line in (line for line in graph["kernels"] if line[0] == "triton"):
                sums = totals.setdefault(f"{block['kind']} {name}: {line[1]}", [0.0, 0.0, 0.0])
                values = 1e3 * seconds_of(line, rates("H100")), line[2], (*line, line[3])[5] / 1e9
                sums[:] = [old + block["count"] * value for old, value in zip(sums, values, strict=True)]
    for name, (ms, count, gigabytes) in sorted(totals.items(), key=lambda item: -item[1][0])[:limit]:
        yield [name, str(int(count)), f"{gigabytes:.2f}", f"{ms:.1f}"]


def selective_lines(rows: Rows) -> list[list[str]]:
    """Each budget's time and memory against keeping everything."""
    return [
        [name, way, f"{seconds(blocks, way)[-1] / seconds(blocks, NONE)[-1]:.2f}",
         f"{kept_bytes(blocks, way) / kept_bytes(blocks, NONE):.2f}"]
        for name, blocks in rows.items() for way in blocks[0]["graphs"] if way != NONE
    ]  # fmt: skip


def rest_lines(counted: dict[str, Any], earlier: dict[str, Any]) -> str:
    """Launches, bytes and seconds of a step of the first row: its blocks, and everything outside of them."""

    def cells(counts: dict[str, Any]) -> list[str]:
        blocks, rest = next(iter(counts["rows"].values())), counts["rest"]
        in_blocks, h100 = step_launches(blocks, NONE), rates("H100")
        apart = sum(seconds_of(line, h100) for line in rest["kernels"])
        return [str(in_blocks), str(launches(rest)), str(in_blocks + launches(rest)), f"{size(rest) / 1e9:.2f}",
                f"{seconds(blocks, NONE)[-1] + apart:.3f}"]  # fmt: skip

    titles = (next(iter(counted["rows"])), "launches of the blocks", "of clip, AdamW and casts", "in all",
              "GB of clip, AdamW and casts", "seconds in all")  # fmt: skip
    return markdown_table(titles, [["before", *cells(earlier)], ["now", *cells(counted)]])


def page(counted: dict[str, Any], earlier: dict[str, Any]) -> str:
    """The page. earlier: counts of the commit that the changes are shown against."""
    rows: Rows = counted["rows"]
    h100 = rates("H100")
    first = next(iter(rows))
    sources = "\n".join(f"- {name}: {card.source}" for name, card in CARDS.items())
    return f"""# Kernels and bytes of a training step, counted

    python benchmarks counted --write

torch {counted["torch"]}, Triton {counted["triton"]}, no GPU. Blocks of the real shapes in bf16, with a LoRA of rank
{counted["rank"]} on every Linear, are lowered by inductor for an H100. GB are what the kernels of one block read and
write, by inductor's count; of the eager block what its ops take and give, RMS norm as the one op that it is on
a GPU. With full recompute the compiled forward runs twice: the second time it is the same graph. Own kernels are those
that are neither products nor attention, casts of the adapters among them.

{counts_table(rows)}

## Priced

Seconds of a step's blocks at {h100.products / 1e12:.0f} TFLOP/s in products, {h100.attention / 1e12:.0f} and
{h100.attention_backward / 1e12:.0f} in attention's forward and backward, and {h100.bandwidth / 1e12:.1f} TB/s (an
H100): a price by these rates, no measurement. Other kernels take what their memory or their cycles take, whichever is
longer, and 3 us each (`cost.py`, `triton_work.py`). By these counts of the code that ran on one H100 with torch 2.11,
each kind of kernel comes out within 5 % of what it took there, with nothing recomputed and with all
(`counted_measured.json`). Of eager kernels only the bytes are known: there those beside products and attention took
a third longer. Lines with a star were counted by bytes only, and cost more than they say:
`counted.py --write` counts them whole.

{priced(rows)}

Other cards at the same parts of their peaks, as dense bf16 products and memory:

{cards_table(rows)}

{sources}

## A whole step

{rest_lines(counted, earlier)}

## Selective checkpointing

Time of a step's blocks and what they keep, as parts of those where nothing is computed again:

{markdown_table(("model", "budget", "time", "kept"), selective_lines(rows))}

## Before and after

Against the counts of the code that ran on an H100 (`counted_before.json`), lowered by the same torch.

{compared(earlier["rows"], rows)}

## Longest kernels

The kernels of inductor that take longest in a step of {first}, nothing recomputed:

{markdown_table(("kernel", "launches a step", "GB a step", "ms a step"), list(_longest(rows[first], 10)))}
"""

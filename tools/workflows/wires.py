"""Route wires around nodes: the frontend draws a wire straight from slot to slot, under the nodes between.

A wire that would cross a node that it does not belong to goes out to the right of its origin, up to a lane of its own
above all nodes, along that and down again to the left of its target, by reroutes. Links of one output share the way as
far as they can.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TITLE, SLOT = 30, 20  # heights of a node's title and of a slot's row
# Between lanes; from a node's side to a wire, and between wires there
LANE = 8
ASIDE = 12
BETWEEN = 6
Point = tuple[float, float]


@dataclass(frozen=True)
class Wire:
    """A link, with the ids of its nodes and the numbers of their slots."""

    id: int
    origin: int
    output: int
    target: int
    input: int


def crosses(rect: Sequence[float], start: Point, end: Point) -> bool:
    """Return whether the line from start to end meets the inside of rect (left, top, right, bottom). After Liang and
    Barsky 1984, A New Concept and Method for Line Clipping."""
    (x, y), (dx, dy) = start, (end[0] - start[0], end[1] - start[1])
    first, last = 0.0, 1.0
    for step, room in ((-dx, x - rect[0]), (dx, rect[2] - x), (-dy, y - rect[1]), (dy, rect[3] - y)):
        if step == 0:
            if room <= 0:
                return False
        elif step < 0:
            first = max(first, room / step)
        else:
            last = min(last, room / step)
    return first < last


def rect_of(node: Mapping[str, Any]) -> tuple[float, float, float, float]:
    (x, y), (width, height) = node["pos"], node["size"]
    return x, y - TITLE, x + width, y + height


def start_of(node: Mapping[str, Any], output: int) -> Point:
    return node["pos"][0] + node["size"][0], node["pos"][1] + SLOT * (output + 0.7)


def end_of(node: Mapping[str, Any], number: int) -> Point:
    """Point at which a link enters; that of a widget enters at it, which is near enough to the node's middle."""
    plain = [place for place, slot in enumerate(node["inputs"]) if "widget" not in slot]
    x, y = node["pos"]
    return x, y + SLOT * (plain.index(number) + 0.7) if number in plain else y + node["size"][1] / 2


def around(nodes: Sequence[Mapping[str, Any]], wires: Sequence[Wire]) -> dict[str, Any]:
    """Return the `extra` of a workflow with the reroutes of all wires that would cross a node."""
    by_id = {node["id"]: node for node in nodes}
    reroutes: list[dict[str, Any]] = []
    ends: list[dict[str, int]] = []
    ways: dict[tuple[int, int], tuple[float, int]] = {}  # of an output: its lane, and its last reroute there
    turns: dict[tuple[tuple[int, int], float], int] = {}  # of an output and a side to turn down at: the reroute there
    beside: dict[tuple[float, int], int] = {}  # wires that run up and down at a side of nodes
    highest = min(rect_of(node)[1] for node in nodes) - LANE

    def at_side(x: float, step: int) -> float:
        number = beside[x, step] = beside.get((x, step), -1) + 1
        return x + step * (ASIDE + BETWEEN * number)

    def reroute(point: Point, parent: int | None, link: int) -> int:
        entry = {"id": len(reroutes) + 1, "pos": [round(point[0]), round(point[1])], "linkIds": [link]}
        reroutes.append(entry | ({} if parent is None else {"parentId": parent}))
        return len(reroutes)

    def join(number: int | None, link: int) -> None:
        while number is not None:
            if link not in reroutes[number - 1]["linkIds"]:
                reroutes[number - 1]["linkIds"].append(link)
            number = reroutes[number - 1].get("parentId")

    for wire in wires:
        start, end = start_of(by_id[wire.origin], wire.output), end_of(by_id[wire.target], wire.input)
        other_rects = (rect_of(node) for key, node in by_id.items() if key not in (wire.origin, wire.target))
        if not any(crosses(rect, start, end) for rect in other_rects):
            continue
        source = (wire.origin, wire.output)
        if source not in ways:
            lane, side = highest - LANE * len(ways), at_side(start[0], 1)
            ways[source] = lane, reroute((side, lane), reroute((side, start[1]), None, wire.id), wire.id)
        lane, up = ways[source]
        target_side = by_id[wire.target]["pos"][0]
        if (source, target_side) not in turns:
            turns[source, target_side] = reroute((at_side(target_side, -1), lane), up, wire.id)
        turn = turns[source, target_side]
        down = reroute((reroutes[turn - 1]["pos"][0], end[1]), turn, wire.id)
        join(down, wire.id)
        ends.append({"id": wire.id, "parentId": down})
    return {"reroutes": reroutes, "linkExtensions": ends} if ends else {}

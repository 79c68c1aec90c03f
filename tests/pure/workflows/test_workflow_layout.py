"""The shared workflows on the canvas: small enough to be read, and no wire under a node."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tools" / "workflows"))

from wires import crosses, end_of, rect_of, start_of  # noqa: E402

NAMES = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
WIDEST, HIGHEST = 2300, 1350


def load(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))


def kinds(name: str) -> list[str]:
    return [node["type"] for node in load(name)["nodes"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_fits_a_screen(name):
    workflow = load(name)
    rects = [rect_of(node) for node in workflow["nodes"]]
    rects += [(x, y, x + w, y + h) for x, y, w, h in (group["bounding"] for group in workflow["groups"])]
    rects += [(x, y, x, y) for x, y in (reroute["pos"] for reroute in workflow["extra"].get("reroutes", ()))]
    assert max(r[2] for r in rects) - min(r[0] for r in rects) <= WIDEST
    assert max(r[3] for r in rects) - min(r[1] for r in rects) <= HIGHEST
    assert "ds" not in workflow["extra"]  # so that the frontend fits it to the window


@pytest.mark.parametrize("name", NAMES)
def test_nodes_lie_apart_and_each_is_in_one_group_but_the_note(name):
    workflow = load(name)
    rects = {node["id"]: rect_of(node) for node in workflow["nodes"]}
    numbers = sorted(rects)
    for place, first in enumerate(numbers):
        for second in numbers[place + 1 :]:
            a, b = rects[first], rects[second]
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (first, second)
    for node in workflow["nodes"]:
        left, top, right, bottom = rects[node["id"]]
        around = [
            group["title"]
            for group in workflow["groups"]
            for x, y, w, h in [group["bounding"]]
            if x <= left and y <= top and right <= x + w and bottom <= y + h
        ]
        assert len(around) == (0 if node["type"] == "MarkdownNote" else 1), (node["type"], around)


@pytest.mark.parametrize("name", NAMES)
def test_groups_have_no_empty_half(name):
    workflow = load(name)
    for x, y, width, height in (group["bounding"] for group in workflow["groups"]):
        rects = [rect_of(node) for node in workflow["nodes"]]
        inside = [r for r in rects if x <= r[0] and y <= r[1] and r[2] <= x + width and r[3] <= y + height]
        for first, last, start, size in ((0, 2, x, width), (1, 3, y, height)):
            middle = start + size / 2
            assert min(r[first] for r in inside) < middle < max(r[last] for r in inside)
        assert sum((r[2] - r[0]) * (r[3] - r[1]) for r in inside) > width * height / 2


@pytest.mark.parametrize("name", NAMES)
def test_wires_run_under_no_node(name):
    workflow = load(name)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    reroutes = {reroute["id"]: reroute for reroute in workflow["extra"].get("reroutes", ())}
    ways = {end["id"]: end["parentId"] for end in workflow["extra"].get("linkExtensions", ())}
    for number, origin, output, target, slot, _ in workflow["links"]:
        points = [end_of(nodes[target], slot)]
        parent = ways.get(number)
        while parent is not None:
            assert number in reroutes[parent]["linkIds"]
            points.insert(0, tuple(reroutes[parent]["pos"]))
            parent = reroutes[parent].get("parentId")
        points.insert(0, start_of(nodes[origin], output))
        for start, end in zip(points, points[1:], strict=False):
            for key, node in nodes.items():
                # A wire round a way touches its own nodes only where it begins and ends.
                is_own = key in (origin, target)
                assert is_own or not crosses(rect_of(node), start, end), (number, nodes[origin]["type"], node["type"])


def test_a_line_through_a_corner_of_the_inside_crosses_and_one_along_a_side_does_not():
    rect = (0.0, 0.0, 10.0, 10.0)
    assert crosses(rect, (-1, 8), (3, 12)) and crosses(rect, (5, -5), (5, 15)) and crosses(rect, (2, 2), (3, 3))
    assert (
        not crosses(rect, (0, -5), (0, 15))
        and not crosses(rect, (-5, 5), (-1, 5))
        and not crosses(rect, (11, 0), (11, 9))
    )


@pytest.mark.parametrize("name", NAMES)
def test_note_has_three_steps_and_groups_have_different_colours(name):
    workflow = load(name)
    (note,) = (node for node in workflow["nodes"] if node["type"] == "MarkdownNote")
    headings = [line for line in note["widgets_values"][0].splitlines() if line.startswith("### ")]
    assert [heading[4] for heading in headings] == ["1", "2", "3"]
    colours = [group["color"] for group in workflow["groups"]]
    assert len(set(colours)) == len(colours) >= 3


@pytest.mark.parametrize("name", [name for name in NAMES if "TesseraTrainLora" in kinds(name)])
def test_every_workflow_that_trains_shows_previews_and_plans_its_memory(name):
    workflow = load(name)
    (memory,) = (node for node in workflow["nodes"] if node["type"] == "TesseraMemory")
    assert memory["widgets_values"][0] == "auto" and -1 in memory["widgets_values"]
    assert {"TesseraPreview", "TesseraMemory"} <= set(kinds(name))
    linked = {(link[3], link[5]) for link in workflow["links"]}
    (train,) = (node["id"] for node in workflow["nodes"] if node["type"] == "TesseraTrainLora")
    assert {(train, "TESSERA_MEMORY"), (train, "TESSERA_PREVIEW")} <= linked

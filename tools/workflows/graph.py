"""A workflow described in a few lines, written in the two forms in which ComfyUI reads one.

A graph is a row of columns, each a group with a note at its top and its nodes below one another. What inputs a node
has, which of them are widgets and what their defaults are is read from a server's `/object_info`.
"""

import copy
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOP, GAP, NOTE_HEIGHT, ROW, HEAD = 70, 45, 200, 25, 40
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3")
VERSIONS = {"tessera": ("tessera", "0.1.0"), "core": ("comfy-core", "0.30.0")}

Output = tuple["Node", int]


@dataclass(frozen=True)
class ModelFile:
    """A file that a loader names: where it is downloaded, and the folder below `models` that it goes to."""

    url: str
    directory: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


@dataclass
class Node:
    """kind: of the node; given: its inputs that are not defaults, an `Output` where it is linked; tall: its least
    height in pixels, for what it shows beside its inputs."""

    id: int
    kind: str
    given: dict[str, Any]
    title: str | None = None
    tall: int = 0
    files: tuple[ModelFile, ...] = ()

    def __getitem__(self, output: int) -> Output:
        return self, output


@dataclass
class Column:
    title: str
    width: int
    note: tuple[str, str]
    note_height: int = NOTE_HEIGHT
    nodes: list[list[Node]] = field(default_factory=lambda: [[]])
    widths: list[int] = field(default_factory=list)  # of the rows of nodes beside one another; `width` unless given


class Graph:
    """`column` begins a column, `beside` a second row of nodes in it (of another width if one is given), `node` puts a
    node below the last one."""

    def __init__(self, name: str, object_info: Mapping[str, Any]):
        self.name, self.info = name, object_info
        self.columns: list[Column] = []
        self._last = 0

    def column(self, title: str, width: int, heading: str, note: str, note_height: int = NOTE_HEIGHT) -> None:
        self.columns.append(Column(title, width, (heading, note), note_height, widths=[width]))
        self._last += 1  # the note's

    def beside(self, width: int = 0) -> None:
        column = self.columns[-1]
        column.nodes.append([])
        column.widths.append(width or column.width)

    def node(
        self, kind: str, title: str | None = None, tall: int = 0, files: Sequence[ModelFile] = (), **given: Any
    ) -> Node:
        known = {name for name, _ in self._inputs(kind)}
        assert given.keys() <= known, (kind, given.keys() - known)
        self._last += 1
        made = Node(self._last, kind, given, title, tall, tuple(files))
        self.columns[-1].nodes[-1].append(made)
        return made

    def files(self) -> list[ModelFile]:
        return list(dict.fromkeys(file for node in self._nodes() for file in node.files))

    def _nodes(self) -> list[Node]:
        return [node for column in self.columns for row in column.nodes for node in row]

    def _inputs(self, kind: str) -> list[tuple[str, list[Any]]]:
        """All inputs but those that grow: the frontend adds their places itself."""
        found = self.info[kind]["input"]
        listed = [*found.get("required", {}).items(), *found.get("optional", {}).items()]
        return [(name, spec) for name, spec in listed if spec[0] != "COMFY_AUTOGROW_V3"]

    def _is_widget(self, spec: Sequence[Any]) -> bool:
        options = spec[1] if len(spec) > 1 else {}
        return (isinstance(spec[0], list) or spec[0] in WIDGETS) and not options.get("forceInput")

    def _kind(self, output: Output) -> str:
        return self.info[output[0].kind]["output"][output[1]]

    def _value(self, node: Node, name: str, spec: Sequence[Any]) -> Any:
        if name in node.given:
            return node.given[name]
        options = spec[1] if len(spec) > 1 else {}
        choices = spec[0] if isinstance(spec[0], list) else options.get("options", [])
        first = choices[0]["key"] if choices and isinstance(choices[0], dict) else choices[0] if choices else None
        value = options.get(
            "default", first if choices else {"BOOLEAN": False, "INT": 0, "FLOAT": 0}.get(str(spec[0]), "")
        )
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def api(self) -> dict[str, Any]:
        """The API form: what is posted to `/prompt`."""
        prompt = {}
        for node in self._nodes():
            inputs: dict[str, Any] = {}
            for name, spec in self._inputs(node.kind):
                if isinstance(link := node.given.get(name), tuple):
                    inputs[name] = [str(link[0].id), link[1]]
                elif self._is_widget(spec):
                    inputs[name] = self._value(node, name, spec)
            title = self.info[node.kind].get("display_name") or node.kind
            prompt[str(node.id)] = {"inputs": inputs, "class_type": node.kind, "_meta": {"title": node.title or title}}
        return prompt

    def ui(self) -> dict[str, Any]:
        """The form that the frontend opens and saves."""
        links: list[list[Any]] = []
        made: list[dict[str, Any]] = []
        groups: list[dict[str, Any]] = []
        x = number = 0
        bottom = 0
        for place, column in enumerate(self.columns):
            number += 1
            width = sum(column.widths) + (len(column.nodes) - 1) * GAP
            made.append(_note(number, x, width, *column.note, column.note_height))
            left = x
            for row_width, nodes in zip(column.widths, column.nodes, strict=True):
                y = TOP + column.note_height + 60
                for node in nodes:
                    number += 1
                    assert number == node.id, (number, node)
                    drawn = self._draw(node, left, y, row_width, links)
                    made.append(drawn)
                    y += drawn["size"][1] + GAP + 10
                bottom = max(bottom, y)
                left += row_width + GAP
            groups.append(
                {"id": place + 1, "title": f"{place + 1}  {column.title}", "bounding": [x - 20, 0, width + 40, 0]}
            )
            x += width + 80
        for group in groups:
            group["bounding"][3] = bottom
            group |= {"color": "#3f789e", "flags": {}}
        by_id = {node["id"]: node for node in made}
        for link in links:
            output = by_id[link[1]]["outputs"][link[2]]
            output["links"] = [*(output["links"] or []), link[0]]
        for order, drawn in enumerate(made):
            drawn["order"] = order
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"tessera/{self.name}")),
            "revision": 0,
            "last_node_id": number,
            "last_link_id": len(links),
            "nodes": made,
            "links": links,
            "groups": groups,
            "config": {},
            "extra": {"ds": {"scale": 0.6, "offset": [110, 90]}},
            "version": 0.4,
        }

    def _draw(self, node: Node, x: int, y: int, width: int, links: list[list[Any]]) -> dict[str, Any]:
        info = self.info[node.kind]
        optional = info["input"].get("optional", {})
        inputs: list[dict[str, Any]] = []
        values: list[Any] = []
        rows = 0
        specs = self._inputs(node.kind)
        # The frontend puts what can only be linked first.
        for name, spec in sorted(specs, key=lambda item: self._is_widget(item[1])):
            is_widget = self._is_widget(spec)
            kind = "COMBO" if isinstance(spec[0], list) else spec[0]
            slot: dict[str, Any] = {"localized_name": name, "name": name}
            slot |= {"shape": 7} if name in optional else {}
            slot |= {"type": kind} | ({"widget": {"name": name}} if is_widget else {}) | {"link": None}
            if isinstance(link := node.given.get(name), tuple):
                links.append([len(links) + 1, link[0].id, link[1], node.id, len(inputs), self._kind(link)])
                slot["link"] = len(links)
            inputs.append(slot)
            if is_widget:
                options = spec[1] if len(spec) > 1 else {}
                linked = isinstance(node.given.get(name), tuple)
                values.append(options.get("default") if linked else self._value(node, name, spec))
                rows += 4 if options.get("multiline") else 1
                if name in ("seed", "noise_seed") and options.get("control_after_generate"):
                    values.append("fixed")
                    rows += 1
        outputs = [
            {"localized_name": name, "name": name, "type": kind, "links": None}
            for kind, name in zip(info["output"], info["output_name"], strict=True)
        ]
        slots = sum("widget" not in slot for slot in inputs)
        height = max(node.tall, HEAD + ROW * (max(slots, len(outputs)) + rows))
        properties: dict[str, Any] = {"Node name for S&R": node.kind}
        if node.files:
            properties["models"] = [{"name": f.name, "url": f.url, "directory": f.directory} for f in node.files]
        origin, version = VERSIONS["tessera" if node.kind.startswith("Tessera") else "core"]
        drawn = {
            "id": node.id,
            "type": node.kind,
            "pos": [x, y],
            "size": [width, height],
            "flags": {},
            "order": 0,
            "mode": 0,
        }
        drawn |= {"inputs": inputs, "outputs": outputs} | ({"title": node.title} if node.title else {})
        return drawn | {"properties": properties | {"cnr_id": origin, "ver": version}, "widgets_values": values}

    def write(self, folder: Path) -> None:
        for path, content in (
            (folder / f"{self.name}.json", self.ui()),
            (folder / "api" / f"{self.name}.json", self.api()),
        ):
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def bring_up_to_date(path: Path, object_info: Mapping[str, Any]) -> None:
    """Gives the nodes of a workflow that was laid out by hand, in both of its forms, the inputs and outputs that have
    been appended to their kinds since, with their defaults."""
    graph = Graph(path.stem, object_info)
    api_path = path.parent / "api" / path.name
    before = [json.loads(file.read_text(encoding="utf-8")) for file in (path, api_path)]
    ui, api = copy.deepcopy(before)
    for node in ui["nodes"]:
        if (info := object_info.get(node["type"])) is None:
            continue
        known = {slot["name"] for slot in node["inputs"]}
        fresh = graph._draw(Node(node["id"], node["type"], {}), 0, 0, 0, [])
        added = [slot for slot in fresh["inputs"] if slot["name"] not in known]
        for slot in added:
            node["inputs"].append(slot)
            if "widget" in slot:
                spec = next(spec for name, spec in graph._inputs(node["type"]) if name == slot["name"])
                value = graph._value(Node(0, node["type"], {}), slot["name"], spec)
                node["widgets_values"].append(value)
                api[str(node["id"])]["inputs"][slot["name"]] = value
        node["outputs"] += (
            fresh["outputs"][len(node["outputs"]) :] if len(info["output"]) > len(node["outputs"]) else []
        )
    for file, content, old in zip((path, api_path), (ui, api), before, strict=True):
        if content != old:
            file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _note(number: int, x: int, width: int, heading: str, text: str, height: int) -> dict[str, Any]:
    note: dict[str, Any] = {"id": number, "type": "MarkdownNote", "pos": [x, TOP], "size": [width, height]}
    note |= {"flags": {}, "order": 0, "mode": 0, "inputs": [], "outputs": [], "title": heading, "properties": {}}
    return note | {"widgets_values": [text], "color": "#222", "bgcolor": "#000"}


def list_of_files(files: Sequence[ModelFile]) -> str:
    """The lines of a note that say where to get each file and where it goes."""
    lines = [f"- [{file.name}]({file.url}) in `{file.directory}`" for file in files]
    return "\n".join(["Files and where they go, below `ComfyUI/models`:", "", *lines])

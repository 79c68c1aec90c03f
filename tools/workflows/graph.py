"""A workflow described in a few lines, written in the two forms in which ComfyUI reads one.

A graph is a row of columns, each a group with its nodes below one another, and one note above the first. What inputs
a node has, which of them are widgets and what their defaults are is read from a server's `/object_info`. A wire that
would run under a node takes a way around it (`wires`).
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wires import Wire, around

TOP = 66
GAP = 46
APART = 66
# Heights as LiteGraph computes them.
SLOT = 20
ROW = 24
FOOT = 8
EDGE = 8
MULTILINE, BUTTON = 4, 1  # rows of a field of text, and of what shows the other widgets
BYPASSED = 4  # the mode of a node
COLOURS = ("#3f789e", "#8a6d3b", "#5d7a3a", "#7a4a7a", "#a1574d", "#3b7a78")
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3")
VERSIONS = {"tessera": ("tessera", "0.1.0"), "core": ("comfy-core", "0.30.0")}

Output = tuple["Node", int]


@dataclass(frozen=True)
class ModelFile:
    """A file that a loader names: its address, and the folder below `models` that it belongs to."""

    url: str
    directory: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


@dataclass
class Node:
    """kind: type of the node; inputs: those that are not defaults, an `Output` for a link; tall: its least height in
    pixels, with room for what it shows below its inputs; bypassed: it rests until the user switches it on."""

    id: int
    kind: str
    inputs: dict[str, Any]
    title: str | None = None
    tall: int = 0
    seed_after: str = "fixed"  # of the seed after a run
    files: tuple[ModelFile, ...] = ()
    bypassed: bool = False

    def __getitem__(self, output: int) -> Output:
        return self, output


@dataclass
class Column:
    """widths: of the rows of nodes, from left to right."""

    title: str
    widths: list[int]
    nodes: list[list[Node]] = field(default_factory=lambda: [[]])


class NodeInfo:
    """What a server's `/object_info` says of the inputs and outputs of nodes.

    nodes: its entries by the kind of node.
    """

    def __init__(self, object_info: Mapping[str, Any]):
        self.nodes = object_info

    def inputs(self, kind: str) -> list[tuple[str, list[Any]]]:
        """List all inputs but those that grow: the frontend adds their free slots itself."""
        inputs = self.nodes[kind]["input"]
        listed = [*inputs.get("required", {}).items(), *inputs.get("optional", {}).items()]
        return [(name, spec) for name, spec in listed if spec[0] != "COMFY_AUTOGROW_V3"]

    def grows(self, kind: str, name: str) -> bool:
        """Return whether `name` is a slot of an input that grows, such as `lora_models.lora0`."""
        inputs = self.nodes[kind]["input"]
        spec = {**inputs.get("required", {}), **inputs.get("optional", {})}.get(name.partition(".")[0])
        return "." in name and spec is not None and spec[0] == "COMFY_AUTOGROW_V3"

    def is_widget(self, spec: Sequence[Any]) -> bool:
        options = spec[1] if len(spec) > 1 else {}
        # An input of several types is the widget of one of them.
        kind = options.get("widgetType", spec[0])
        return (isinstance(kind, list) or kind in WIDGETS) and not options.get("forceInput")

    def type_of(self, output: Output) -> str:
        return self.nodes[output[0].kind]["output"][output[1]]

    def value(self, node: Node, name: str, spec: Sequence[Any]) -> Any:
        if name in node.inputs:
            return node.inputs[name]
        options = spec[1] if len(spec) > 1 else {}
        choices = spec[0] if isinstance(spec[0], list) else options.get("options", [])
        first = choices[0]["key"] if choices and isinstance(choices[0], dict) else choices[0] if choices else None
        value = options.get(
            "default", first if choices else {"BOOLEAN": False, "INT": 0, "FLOAT": 0}.get(str(spec[0]), "")
        )
        return int(value) if isinstance(value, float) and value.is_integer() else value


class Graph:
    """`note` writes above the first column, `column` begins one, `beside` a further row of nodes in it (of another
    width if one is given), `node` puts a node below the last one."""

    def __init__(self, name: str, object_info: Mapping[str, Any]):
        self.name, self.info = name, NodeInfo(object_info)
        self.columns: list[Column] = []
        self.text, self.text_height = "", 0
        self._last = 1  # the note's
        self._row = -1

    def note(self, text: str, height: int) -> None:
        self.text, self.text_height = text, height

    def column(self, title: str, width: int) -> None:
        self.columns.append(Column(title, [width]))
        self._row = -1

    def beside(self, width: int = 0) -> None:
        column = self.columns[-1]
        column.nodes.append([])
        column.widths.append(width or column.widths[0])

    def back(self) -> None:
        """Go on below the last node of the column's first row."""
        self._row = 0

    def node(
        self,
        kind: str,
        title: str | None = None,
        tall: int = 0,
        files: Sequence[ModelFile] = (),
        seed_after: str = "fixed",
        bypassed: bool = False,
        **inputs: Any,
    ) -> Node:
        names = {name for name, _ in self.info.inputs(kind)} | {n for n in inputs if self.info.grows(kind, n)}
        assert inputs.keys() <= names, (kind, inputs.keys() - names)
        self._last += 1
        node = Node(self._last, kind, inputs, title, tall, seed_after, tuple(files), bypassed)
        self.columns[-1].nodes[self._row].append(node)
        return node

    def files(self) -> list[ModelFile]:
        return list(dict.fromkeys(file for node in self._nodes() for file in node.files))

    def _nodes(self) -> list[Node]:
        return [node for column in self.columns for row in column.nodes for node in row]

    def _grown(self, node: Node) -> list[tuple[str, Output]]:
        """List the links to slots of inputs that grow."""
        return [(name, link) for name, link in node.inputs.items() if self.info.grows(node.kind, name)]

    def api(self) -> dict[str, Any]:
        """Return the API form, which is posted to `/prompt`."""
        prompt = {}
        for node in self._nodes():
            if node.bypassed:
                continue
            inputs: dict[str, Any] = {}
            for name, spec in self.info.inputs(node.kind):
                if isinstance(link := node.inputs.get(name), tuple):
                    inputs[name] = [str(link[0].id), link[1]]
                elif self.info.is_widget(spec):
                    inputs[name] = self.info.value(node, name, spec)
            for name, link in self._grown(node):
                inputs[name] = [str(link[0].id), link[1]]
            title = self.info.nodes[node.kind].get("display_name") or node.kind
            prompt[str(node.id)] = {"inputs": inputs, "class_type": node.kind, "_meta": {"title": node.title or title}}
        return prompt

    def ui(self) -> dict[str, Any]:
        """Return the form that the frontend opens and saves. It has no view, so that the frontend fits it to the
        window."""
        links: list[list[Any]] = []
        nodes_drawn = [_note(self.columns[0].widths[0], self.text, self.text_height)]
        groups: list[dict[str, Any]] = []
        x = 0
        for place, column in enumerate(self.columns):
            top = 0 if place else self.text_height + 20
            column_x, bottom = x, top
            for row_width, nodes in zip(column.widths, column.nodes, strict=True):
                y = top + TOP
                for node in nodes:
                    node_data = self._draw(node, column_x, y, row_width, links)
                    nodes_drawn.append(node_data)
                    y += node_data["size"][1] + GAP
                bottom = max(bottom, y - GAP + 20)
                column_x += row_width + GAP
            bounding = [x - 20, top, column_x - GAP - x + 40, bottom - top]
            group = {"id": place + 1, "title": f"{place + 1}  {column.title}", "bounding": bounding}
            groups.append(group | {"color": COLOURS[place % len(COLOURS)], "flags": {}})
            x = column_x - GAP + APART
        by_id = {node["id"]: node for node in nodes_drawn}
        for link in links:
            output = by_id[link[1]]["outputs"][link[2]]
            output["links"] = [*(output["links"] or []), link[0]]
        for order, node_data in enumerate(nodes_drawn):
            node_data["order"] = order
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"tessera/{self.name}")),
            "revision": 0,
            "last_node_id": self._last,
            "last_link_id": len(links),
            "nodes": nodes_drawn,
            "links": links,
            "groups": groups,
            "config": {},
            "extra": around(nodes_drawn, [Wire(*link[:5]) for link in links]),
            "version": 0.4,
        }

    def _draw(self, node: Node, x: int, y: int, width: int, links: list[list[Any]]) -> dict[str, Any]:
        info = self.info.nodes[node.kind]
        optional = info["input"].get("optional", {})
        inputs: list[dict[str, Any]] = []
        values: list[Any] = []
        rows, has_hidden = 0, False
        specs = self.info.inputs(node.kind)
        # The frontend puts what can only be linked first.
        for name, spec in sorted(specs, key=lambda item: self.info.is_widget(item[1])):
            is_widget = self.info.is_widget(spec)
            kind = "COMBO" if isinstance(spec[0], list) else spec[0]
            slot: dict[str, Any] = {"localized_name": name, "name": name}
            slot |= {"shape": 7} if name in optional else {}
            slot |= {"type": kind} | ({"widget": {"name": name}} if is_widget else {}) | {"link": None}
            if isinstance(link := node.inputs.get(name), tuple):
                links.append([len(links) + 1, link[0].id, link[1], node.id, len(inputs), self.info.type_of(link)])
                slot["link"] = len(links)
            inputs.append(slot)
            if is_widget:
                options = spec[1] if len(spec) > 1 else {}
                linked = isinstance(node.inputs.get(name), tuple)
                values.append(options.get("default") if linked else self.info.value(node, name, spec))
                widget_rows = 1 if not options.get("multiline") else MULTILINE
                if name in ("seed", "noise_seed") and options.get("control_after_generate"):
                    values.append(node.seed_after)
                    widget_rows += 1
                if options.get("advanced") and not linked and name not in node.inputs:
                    has_hidden = True
                else:
                    rows += widget_rows
        for name, link in self._grown(node):
            kind = self.info.type_of(link)
            links.append([len(links) + 1, link[0].id, link[1], node.id, len(inputs), kind])
            slot = {"label": name.partition(".")[2], "localized_name": name, "name": name, "shape": 7, "type": kind}
            inputs.append(slot | {"link": len(links)})
        outputs = [
            {"localized_name": name, "name": name, "type": kind, "links": None}
            for kind, name in zip(info["output"], info["output_name"], strict=True)
        ]
        slots = sum("widget" not in slot for slot in inputs)
        rows += has_hidden * BUTTON
        height = EDGE + SLOT * max(slots, len(outputs)) + (FOOT + ROW * rows if rows else 0)
        height = max(node.tall, height)
        properties: dict[str, Any] = {"Node name for S&R": node.kind}
        if node.files:
            properties["models"] = [{"name": f.name, "url": f.url, "directory": f.directory} for f in node.files]
        origin, version = VERSIONS["tessera" if node.kind.startswith("Tessera") else "core"]
        node_data = {
            "id": node.id,
            "type": node.kind,
            "pos": [x, y],
            "size": [width, height],
            "flags": {},
            "order": 0,
            "mode": BYPASSED if node.bypassed else 0,
        }
        node_data |= {"inputs": inputs, "outputs": outputs} | ({"title": node.title} if node.title else {})
        node_data |= {"showAdvanced": False} if has_hidden else {}
        return node_data | {"properties": properties | {"cnr_id": origin, "ver": version}, "widgets_values": values}

    def write(self, folder: Path) -> None:
        for path, content in (
            (folder / f"{self.name}.json", self.ui()),
            (folder / "api" / f"{self.name}.json", self.api()),
        ):
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _note(width: int, text: str, height: int) -> dict[str, Any]:
    note: dict[str, Any] = {"id": 1, "type": "MarkdownNote", "pos": [0, 30], "size": [width, height - 10]}
    note |= {"flags": {}, "order": 0, "mode": 0, "inputs": [], "outputs": [], "title": "Three steps", "properties": {}}
    return note | {"widgets_values": [text], "color": "#222", "bgcolor": "#000"}


def list_of_files(files: Sequence[ModelFile]) -> str:
    """Return the lines of a note with the address and the folder of each file."""
    return "\n".join(f"- [{file.name}]({file.url}) in `{file.directory}`" for file in files)

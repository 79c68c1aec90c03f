"""ComfyUI's own workflow templates, as the package that ComfyUI requires has them."""

import json
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def template_file(template: str) -> Path:
    spec = find_spec("comfyui_workflow_templates_json")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "templates" / f"{template}.json"


def has_template(template: str) -> bool:
    """Test for a template of this name; newer packages have more."""
    return template_file(template).is_file()


@cache
def nodes_of(template: str) -> list[dict[str, Any]]:
    """The nodes of a template that are not switched off, those of its subgraphs too."""
    workflow = json.loads(template_file(template).read_text(encoding="utf-8"))
    subgraphs = workflow.get("definitions", {}).get("subgraphs", [])
    nodes = workflow["nodes"] + [node for subgraph in subgraphs for node in subgraph["nodes"]]
    return [node for node in nodes if node.get("mode", 0) == 0]


def values(template: str, *kinds: str) -> Iterator[list[Any]]:
    return (node["widgets_values"] for node in nodes_of(template) if node["type"] in kinds)


def files_of(template: str) -> dict[str, tuple[str, str]]:
    """The files that a template links: name → (folder, address)."""
    links = [link for node in nodes_of(template) for link in node.get("properties", {}).get("models", ())]
    return {link["name"]: (link["directory"], link["url"].removesuffix("?download=true")) for link in links}


def steps_of(template: str) -> set[int]:
    steps = {row[2] for row in values(template, "KSampler")} | {row[3] for row in values(template, "KSamplerAdvanced")}
    steps |= {row[1] for row in values(template, "BasicScheduler")}
    kinds = ("LTXVScheduler", "BetaSamplingScheduler", "SDTurboScheduler", "Ideogram4Scheduler")
    return steps | {row[0] for row in values(template, *kinds)}


def cfg_of(template: str) -> set[float]:
    scales = {row[3] for row in values(template, "KSampler")} | {row[4] for row in values(template, "KSamplerAdvanced")}
    scales |= {row[3] for row in values(template, "SamplerCustom")} | {1.0 for _ in values(template, "BasicGuider")}
    return scales | {row[0] for row in values(template, "CFGGuider", "DualCFGGuider", "DualModelGuider")}


def samplers_of(template: str) -> set[str]:
    names = {row[4] for row in values(template, "KSampler")} | {row[5] for row in values(template, "KSamplerAdvanced")}
    return names | {row[0] for row in values(template, "KSamplerSelect")}


def schedulers_of(template: str) -> set[str]:
    names = {row[5] for row in values(template, "KSampler")} | {row[6] for row in values(template, "KSamplerAdvanced")}
    return names | {row[0] for row in values(template, "BasicScheduler")}

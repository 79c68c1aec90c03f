"""Graphs in API format, made of the shared workflow *Try it*: its training, and its sampling in many ways."""

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

Graph = dict[str, dict[str, Any]]
Chain = Sequence[tuple[str, dict[str, Any]]]

SEEDS = (0, 5)
PLAIN = "plain"
TRY_IT = "try it"
SWAP_WITH_LORA = "Block Swap with a LoRA"
COMPILED = {"backend": "inductor", "mode": "default", "dynamic": "auto", "fullgraph": False, "cache_size_limit": 64,
            "scope": "blocks"}  # fmt: skip
SWAPPED = {"blocks_to_swap": 2, "prefetch_blocks": 1, "pin_memory": "auto"}


def read(workflows: Path) -> Graph:
    """The shared workflow. workflows: the pack's folder of that name."""
    return json.loads((workflows / "api" / "try_it.json").read_text(encoding="utf-8"))


def compile_node(**inputs: Any) -> tuple[str, dict[str, Any]]:
    return "TesseraCompileModel", COMPILED | inputs


def swap_node(**inputs: Any) -> tuple[str, dict[str, Any]]:
    return "TesseraBlockSwap", SWAPPED | inputs


def training(workflow: Graph, steps: int, compiled: str) -> Graph:
    """The workflow with this many steps. compiled: `auto` or `off`."""
    graph = deepcopy(workflow)
    half = max(1, steps // 2)
    _node(graph, "TesseraTrainLora")["inputs"].update(steps=steps, compile=compiled, save_every=half, resume="off")
    _node(graph, "TesseraPreview")["inputs"].update(every_n_steps=half)
    return graph


def sampling(workflow: Graph, chain: Chain, name: str) -> Graph:
    """Two pictures of other seeds from the model without a LoRA, behind the nodes of a chain, and Compile Report if one
    of them compiles. name: of the pictures' files."""
    model = _number(workflow, "TesseraTryItModels")
    node_types = ("TesseraTryItModels", "CLIPTextEncode", "FluxGuidance", "EmptySD3LatentImage")
    graph = {number: deepcopy(node) for number, node in workflow.items() if node["class_type"] in node_types}
    changed = _chained(graph, [model, 0], chain)
    pictures = _pictures(graph, workflow, changed, name)
    if any(kind == "TesseraCompileModel" for kind, _ in chain):
        inputs = {"model": changed, "after": pictures[-1]}
        graph["report"] = {"class_type": "TesseraCompileReport", "inputs": inputs}
    return graph


def swap_with_lora(workflow: Graph, steps: int, chain: Chain) -> Graph:
    """Train for some steps, and sample with the LoRA, resident as `plain` and behind the chain as `changed`."""
    graph = training(workflow, steps, "off")
    lora = _number(workflow, "LoraModelLoader")
    sampled = ("KSampler", "VAEDecode", "SaveImage")
    graph = {number: node for number, node in graph.items() if node["class_type"] not in sampled}
    _pictures(graph, workflow, [lora, 0], "plain")
    _pictures(graph, workflow, _chained(graph, [lora, 0], chain), "changed")
    return graph


def read_report(outputs: dict[str, Any]) -> tuple[str, bool]:
    """Return the text of Compile Report in a sentence, and whether all calls ran compiled. ("", True) without the
    node."""
    if "report" not in outputs:
        return "", True
    report = outputs["report"]["tessera"][0]
    eager = sum(region["eager_calls"] for region in report["regions"])
    recompiles = sum(len(region["recompiles"]) for region in report["regions"])
    words = f"{report['graphs']} graphs in {report['compile_seconds']:.0f} s, {report['graph_breaks']} breaks, "
    words += f"{recompiles} compiled again, {eager} eager calls"
    return "; ".join([words, *report["notes"]]), report["graphs"] > 0 and eager == 0


def _chained(graph: Graph, model: list[Any], chain: Chain) -> list[Any]:
    """Add the nodes of a chain after a model. Return the link of the resulting model."""
    for number, (kind, inputs) in enumerate(chain):
        graph[f"chain {number}"] = {"class_type": kind, "inputs": {"model": model, **inputs}}
        model = [f"chain {number}", 0]
    return model


def _pictures(graph: Graph, workflow: Graph, model: list[Any], name: str) -> list[list[Any]]:
    """Add sampler, decoder and saver for each seed. Return the links of the pictures."""
    sampler, decoder = deepcopy(_node(workflow, "KSampler")), deepcopy(_node(workflow, "VAEDecode"))
    pictures = []
    for number, seed in enumerate(SEEDS):
        prefix = f"{name} {number}"
        inputs = sampler["inputs"] | {"model": model, "seed": seed}
        graph[f"{prefix} sampler"] = {"class_type": "KSampler", "inputs": inputs}
        inputs = decoder["inputs"] | {"samples": [f"{prefix} sampler", 0]}
        graph[f"{prefix} decoder"] = {"class_type": "VAEDecode", "inputs": inputs}
        picture = [f"{prefix} decoder", 0]
        graph[f"{prefix} saver"] = {"class_type": "SaveImage", "inputs": {"images": picture, "filename_prefix": prefix}}
        pictures.append(picture)
    return pictures


def _number(graph: Graph, kind: str) -> str:
    return next(number for number, node in graph.items() if node["class_type"] == kind)


def _node(graph: Graph, kind: str) -> dict[str, Any]:
    return graph[_number(graph, kind)]

"""The cases of the nodes: each a graph that ComfyUI's own executor runs, with dynamic VRAM if there is a card."""

from collections.abc import Iterator
from typing import Any

from card.case import Case, Group
from card.checks.cases import TUNED_SECONDS

OWN_MALLOC = "--disable-cuda-malloc"  # for CUDA graphs, which need torch's native allocator


def nodes(device: str) -> Iterator[Group]:
    """Yield the cases of a ComfyUI with default options, and of CUDA graphs with the allocator that they need."""
    cpu = device == "cpu"
    swap: dict[str, Any] = {}
    default = [
        _case("try it", 60.0, graph="try it", steps=12 if cpu else 120, compile="off" if cpu else "auto"),
        _case("plain", 5.0, graph="plain"),
        _case("Compile Model", 15.0, compiled={}),
        _case("Block Swap with a LoRA", 10.0, graph="swap with a LoRA", steps=12 if cpu else 20),
        _case("Block Swap and Compile Model", 15.0, swapped=swap, compiled={}),
        _case("Compile Model, scope stack, fullgraph", 15.0,
              compiled={"scope": "stack", "fullgraph": True, "dynamic": "false"}),
    ]  # fmt: skip
    if cpu:
        yield _group(default[:5], "")
        return
    tuned = {"scope": "model", "mode": "max-autotune-no-cudagraphs"}
    default.append(_case("Compile Model, scope model, max-autotune-no-cudagraphs", TUNED_SECONDS, compiled=tuned))
    yield _group(default, "")
    graphs = [
        _case(f"Compile Model, {mode}", least, compiled={"mode": mode})
        for mode, least in (("reduce-overhead", 15.0), ("max-autotune", TUNED_SECONDS))
    ]
    yield _group(graphs, OWN_MALLOC)


def _case(name: str, least: float, **settings: Any) -> Case:
    return Case(f"nodes: {name}", {"graph": "sampling", **settings}, 180.0, least)


def _group(cases: list[Case], option: str) -> Group:
    return Group({"kind": "nodes.runs", "option": option}, tuple(cases))

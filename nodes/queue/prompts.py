"""Queued prompts: which nodes an output needs, and which nodes train."""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

TRAIN = "TesseraTrainLora"

# {node id: {"class_type": …, "inputs": {name: value, or [node id, output] of a link}}}
Prompt = Mapping[str, Mapping[str, Any]]


def needed_nodes(prompt: Prompt, targets: Iterable[str]) -> set[str]:
    """Return the ids of `targets` and of every node upstream of them."""
    nodes: set[str] = set()
    pending = [node for node in targets if node in prompt]
    while pending:
        node = pending.pop()
        if node in nodes:
            continue
        nodes.add(node)
        inputs = prompt[node].get("inputs", {}).values()
        sources = (value[0] for value in inputs if isinstance(value, list) and len(value) == 2)
        pending += [source for source in sources if isinstance(source, str) and source in prompt]
    return nodes


def training_nodes(prompt: Prompt, outputs: Iterable[str]) -> set[str]:
    """Return the ids of the Train LoRA nodes that these outputs need."""
    return {node for node in needed_nodes(prompt, outputs) if prompt[node].get("class_type") == TRAIN}


def outputs_behind(prompt: Prompt, outputs: Iterable[str], nodes: Collection[str]) -> list[str]:
    """Return those of the outputs that need one of `nodes`, in their order."""
    return [output for output in outputs if not needed_nodes(prompt, [output]).isdisjoint(nodes)]


def signature(prompt: Prompt, node: str) -> str:
    """Hash a node with everything upstream of it: equal for two prompts in which it computes the same."""
    nodes = needed_nodes(prompt, [node])
    parts = {name: [prompt[name].get("class_type"), prompt[name].get("inputs")] for name in nodes}
    return hashlib.blake2b(json.dumps([node, parts], sort_keys=True).encode(), digest_size=16).hexdigest()

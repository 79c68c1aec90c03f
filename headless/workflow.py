"""The workflow to run, and the inputs changed by `--set`."""

import json
from pathlib import Path
from typing import Any

from .errors import UsageError

Prompt = dict[str, dict[str, Any]]
TRAIN = "TesseraTrainLora"
MOST_BYTES = 32_000_000  # of a workflow, the same bound as in `common/untrusted/budgets.py`


def read_workflow(path: Path) -> tuple[Prompt, dict[str, Any]]:
    """Read a workflow in API format, and its extra data if the file is a request body for a server.

    Raises UsageError for anything else.
    """
    prompt = _read_json(path)
    if isinstance(prompt, dict) and isinstance(prompt.get("nodes"), list):
        raise UsageError(f"{path} is a workflow for the browser; open it there and use Workflow > Export (API).")
    extra_data: Any = {}
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt"), dict):
        prompt, extra_data = prompt["prompt"], prompt.get("extra_data")
    if not isinstance(prompt, dict) or not prompt or not all(_is_node(node) for node in prompt.values()):
        raise UsageError(f"{path} isn't a workflow in API format; use Workflow > Export (API) in ComfyUI.")
    return prompt, extra_data if isinstance(extra_data, dict) else {}


def _read_json(path: Path) -> Any:
    """Read a JSON file. Raises UsageError for one that can't be read, and for one larger than a workflow is."""
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise UsageError(f"{path} has {size / 1e6:.0f} MB; a workflow has at most {MOST_BYTES / 1e6:.0f} MB.")
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}.") from error
    except RecursionError as error:
        raise UsageError(f"{path} has too many lists inside one another; export the workflow again.") from error
    except ValueError as error:
        raise UsageError(f"{path} isn't a JSON file: {error}.") from error


def _is_node(node: Any) -> bool:
    return isinstance(node, dict) and "class_type" in node and isinstance(node.get("inputs", {}), dict)


def set_input(prompt: Prompt, change: str) -> tuple[str, str]:
    """Change an input according to `NODE.INPUT=VALUE`. Returns the node's number and the input's name.

    Raises UsageError unless it names exactly one node, and an input that has a value.
    """
    place, equals, text = change.partition("=")
    if not equals or "." not in place:
        raise UsageError(f"--set {change}: write NODE.INPUT=VALUE, such as TesseraTrainLora.steps=2000.")
    name, matches = "", list[str]()
    parts = place.split(".")
    for split in reversed(range(1, len(parts))):  # titles and nested inputs contain dots
        name, key = ".".join(parts[:split]), ".".join(parts[split:])
        matches = (
            [name] if name in prompt else [number for number, node in prompt.items() if name in names_of_node(node)]
        )
        if matches:
            break
    if len(matches) != 1:
        matches_text = "no node" if not matches else f"{len(matches)} nodes ({', '.join(matches)})"
        raise UsageError(
            f"--set {change}: {matches_text} of the workflow {'are' if len(matches) > 1 else 'is'} called {name}."
        )
    inputs = prompt[matches[0]].setdefault("inputs", {})
    current = inputs.get(key)
    if isinstance(current, list):
        raise UsageError(f"--set {change}: {key} is connected to another node, so it has no value.")
    value = text if isinstance(current, str) else _value(text)
    if isinstance(current, bool) and not isinstance(value, bool):
        raise UsageError(f"--set {change}: {key} is a switch; give true or false.")
    inputs[key] = value
    return matches[0], key


def names_of_node(node: dict[str, Any]) -> tuple[str, str]:
    meta = node.get("_meta")
    return str(node["class_type"]), str(meta.get("title", "")) if isinstance(meta, dict) else ""


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):  # ComfyUI takes any other text as true, even "False"
        return text.lower() == "true"
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UsageError(f"--set: {text[:40]}… has too many lists inside one another; give a plain value.") from error
    except ValueError:
        return text

"""The queued graph, saved with its results so that it can be opened and queued again."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from comfy.cli_args import args

from .folder_access import is_allowed_folder

WORKFLOW, API = "workflow.json", "api.json"


def workflow_files(prompt: Any, extra_pnginfo: Any) -> dict[str, str]:
    """Return the texts to save, by file suffix: the workflow as the browser sent it, and the prompt for `/prompt`.

    Only the last component of an absolute folder is written. A missing graph gives no file, nor does one nested too
    deeply to be walked through, and ComfyUI's --disable-metadata gives no files at all.
    """
    if args.disable_metadata:
        return {}
    graphs: dict[str, Any] = {}
    if isinstance(extra_pnginfo, Mapping) and extra_pnginfo.get("workflow"):
        graphs[WORKFLOW] = extra_pnginfo["workflow"]
    if isinstance(prompt, Mapping) and prompt:
        graphs[API] = queueable(prompt)
    files = {}
    for name, graph in graphs.items():
        with suppress(RecursionError):
            files[name] = json.dumps(_without_folders(graph), indent=1)
    return files


def queueable(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Copy an executed prompt without core's `is_changed` entries, which core would reuse if it is queued again."""
    return {id: {key: node[key] for key in node if key != "is_changed"} for id, node in prompt.items()}


def workflow_texts(files: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of `workflow_files` under the keys that the frontend reads in a PNG or a LoRA file."""
    keys = {"workflow": WORKFLOW, "prompt": API}
    return {key: json.dumps(json.loads(files[suffix])) for key, suffix in keys.items() if suffix in files}


def _without_folders(value: Any) -> Any:
    if isinstance(value, str):
        return PurePath(value).name if is_allowed_folder(value) else value
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    return [_without_folders(item) for item in value] if isinstance(value, list | tuple) else value

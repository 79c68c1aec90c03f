"""Whether what Train LoRA gave in this session still lies on disk, for ComfyUI's cache of its outputs.

A run that is done leaves the count as it was, so that a graph queued again is not executed again; files that are gone
raise it, so that it is.
"""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_given: dict[str, set[Path]] = {}
_times_gone: Counter[str] = Counter()


def remember(output_name: str, loras: Iterable[Path]) -> None:
    """Notes the LoRA files that the node has given under this name."""
    _given.setdefault(output_name, set()).update(loras)


def times_gone(output_name: str | None) -> int:
    """How often a given LoRA, or the summary by which its run is known, was found gone; of all names where it is None,
    as it is for a linked input. Each loss counts once."""
    for name in [output_name] if output_name is not None else list(_given):
        gone = {lora for lora in _given.get(name, ()) if not _is_there(lora)}
        if gone:
            _given[name] -= gone
            _times_gone[name] += 1
    return _times_gone.total() if output_name is None else _times_gone[output_name]


def _is_there(lora: Path) -> bool:
    return os.path.isfile(lora) and os.path.isfile(lora.with_name("summary.json"))  # noqa: PTH113 (raises nothing)

"""Outputs of Train LoRA in this session, watched for deletion on behalf of ComfyUI's output cache.

A finished run leaves the count unchanged, so that a graph queued again is not executed again. Deleted files increase
it, so that it is.
"""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_returned: dict[str, set[Path]] = {}
_times_lost: Counter[str] = Counter()


def record_outputs(output_name: str, loras: Iterable[Path]) -> None:
    """Record the LoRA files that the node has returned under this name."""
    _returned.setdefault(output_name, set()).update(loras)


def record_stopped(output_name: str) -> None:
    """Record that a run was stopped before its last step, so that it continues when queued again."""
    _times_lost[output_name] += 1


def times_lost(output_name: str | None) -> int:
    """Count how often returned LoRAs, or summaries of their runs, were found deleted, and stopped runs.

    Each loss counts once.

    output_name: None, as for a linked input, counts all names.
    """
    for name in [output_name] if output_name is not None else list(_returned):
        deleted = {lora for lora in _returned.get(name, ()) if not _exists(lora)}
        if deleted:
            _returned[name] -= deleted
            _times_lost[name] += 1
    return _times_lost.total() if output_name is None else _times_lost[output_name]


def _exists(lora: Path) -> bool:
    return os.path.isfile(lora) and os.path.isfile(lora.with_name("summary.json"))  # noqa: PTH113 (raises nothing)

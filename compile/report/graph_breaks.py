"""Graph breaks: the places where graphs ended early, from torch's records of them."""

import linecache
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Break:
    """Place where a graph ended early. Equal for the same place and message: a set of them has each once.

    file: source file; empty if torch does not record it.
    line: number of the line, 0 without one.
    source: text of the line, without indentation.
    function: name of the function around it.
    cause: torch's short name of the kind.
    detail: torch's message, which `explain.explain_break` turns into plain words.
    skipped: no graph was made around it, all of `function` runs uncompiled.
    """

    file: str
    line: int
    source: str
    function: str
    cause: str
    detail: str = field(repr=False)
    skipped: bool = False


def break_places(reasons: Sequence[Any], broken: Sequence[Any]) -> tuple[Break, ...]:
    """List each place once, although torch records it for every enclosing function and again when it gives up."""
    breaks: dict[tuple[str, int, str], Break] = {}
    for place in (*map(_break, reasons), *map(_skipped, broken)):
        breaks[place.file, place.line, place.detail.partition("\n  Hint")[0]] = place
    return tuple(breaks.values())


def _break(reason: Any) -> Break:
    """Convert an entry of torch's list of breaks, which records a branch on a tensor's value by its bytecode alone."""
    stack = list(reason.user_stack)
    place = next((frame for frame in reversed(stack) if _is_users(frame.filename)), stack[-1] if stack else None)
    detail = message(reason.reason)
    if detail.startswith("generic_jump"):
        detail = f"Data-dependent branching\n  Developer debug context: {detail}"
    if place is None:
        return Break("", 0, "", "", _first_line(detail), detail)
    line = place.line or linecache.getline(place.filename, place.lineno or 0)
    name = plain_function(place.name)
    return Break(place.filename, place.lineno or 0, (line or "").strip(), name, _first_line(detail), detail)


def _skipped(metrics: Any) -> Break:
    """Describe a function that dynamo gave up, by its own place if the break is in the standard library or torch."""
    file, line = metrics.fail_user_frame_filename or "", metrics.fail_user_frame_lineno or 0
    detail = message(metrics.fail_reason)
    if not _is_users(file):
        detail += f"\n  In: {file}:{line}"
        file, line = metrics.co_filename or "", metrics.co_firstlineno or 0
    source = linecache.getline(file, line).strip()
    return Break(file, line, source, plain_function(metrics.co_name), _first_line(detail), detail, skipped=True)


_TORCH = str(Path(torch.__file__).parent)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def _is_users(file: str) -> bool:
    # site-packages is inside the standard library's folder.
    library = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return bool(file) and not library and not file.startswith(_TORCH)


def message(text: Any) -> str:
    """Strip the addresses of objects, which differ between runs."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(text)).strip()


def _first_line(text: str) -> str:
    return str(text).strip().partition("\n")[0].strip()


def plain_function(name: str | None) -> str:
    """Return the name of the user's function, also for one that dynamo generated to resume after a break."""
    resumed = re.match(r"torch_dynamo_resume_in_(\w+)_at_\d+", name or "")
    return resumed.group(1) if resumed else name or ""

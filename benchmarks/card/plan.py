"""The cases of all parts in the order of their worth, for a card that is available for minutes.

The least known comes first, so that a cut loses the least important. A model is loaded once: groups of one process
follow each other, or the process waits for the next.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from card.case import Case, Group
from card.cases import groups

# Names of cases of other parts that run in FLUX's process, after the part that they are of.
FLUX = (
    ("swap", "rates: link"),
    ("flux", "flux, compiled, none"),
    ("flux", "flux, compiled, full"),
    ("swap", "flux, compiled, full, 100 % swapped"),
    ("swap", "flux, compiled, full, 50 % swapped"),
    ("flux", "flux, compiled, selective"),
    ("others", "flux put into fp8, fp8 products, compiled, full"),
    ("others", "flux put into int8, int8 products, compiled, full"),
)
# Parts of the time that a group may take, so that one that hangs leaves something for the next.
FIRST = 0.25
MAIN = 0.45
SOME = 0.2
LAST = 1.0
GRAPHS, TUNED = "reduce-overhead", "max-autotune"  # modes, in the names of cases


def plan(device: str, size: str, machine: dict[str, Any]) -> list[Group]:
    """Return the groups in the order in which they run. Tuned cases take minutes and come last."""
    planned = list(_plan(device, size, machine))
    groups = [_drop_cases(group, (TUNED,)) for group in planned] + [_matching(group, TUNED) for group in planned]
    return [group for group in groups if group.cases]


def _plan(device: str, size: str, machine: dict[str, Any]) -> Iterator[Group]:
    by_part = {
        part: groups(part, device, size, machine) for part in ("smoke", "flux", "swap", "nodes", "wan", "others")
    }
    allocators = len({group.process() for group in by_part["smoke"]})
    first, rest = by_part["smoke"][:allocators], by_part["smoke"][allocators:]
    yield from (replace(group, share=FIRST) for group in first)
    yield _single_process("flux", by_part)
    yield from (replace(_matching(group, GRAPHS), share=SOME) for group in rest)
    yield from (replace(group, share=FIRST) for group in by_part["nodes"])
    yield from (replace(_matching(group, "wan 1.3B, compiled, full"), share=SOME) for group in by_part["wan"])
    yield from (replace(_drop_cases(group, (GRAPHS,)), share=SOME) for group in rest)
    yield from (_matching(group, "wan 14B", "wan, ") for group in by_part["wan"])
    yield from (_matching(group, "qwen_image") for group in by_part["others"])
    yield from (_matching(group, "core's Train LoRA") for group in by_part["others"])
    yield from (_matching(group, "klein, compiled, none") for group in by_part["others"])
    yield from (_matching(group, "KSampler") for group in reversed(by_part["swap"]))


def _single_process(model: str, by_part: dict[str, list[Group]]) -> Group:
    """FLUX's cases from several parts, on one MODEL."""
    by_name = {(part, _plain(case)): case for part in by_part for group in by_part[part] for case in group.cases}
    cases = tuple(by_name[name] for name in FLUX if name in by_name)
    return Group({"kind": "steps", "model": model}, cases, share=MAIN, timed=True)


def _plain(case: Case) -> str:
    return case.name.removesuffix(", swapped to fit")


def _matching(group: Group, *texts: str) -> Group:
    return replace(group, cases=tuple(c for c in group.cases if any(text in c.name for text in texts)), share=LAST)


def _drop_cases(group: Group, texts: Sequence[str]) -> Group:
    return replace(group, cases=tuple(c for c in group.cases if not any(text in c.name for text in texts)))

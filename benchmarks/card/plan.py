"""The cases of all parts in the order of their worth, for a card that is there for minutes.

What is first is what is least known; what was cut off is what matters least. A model is loaded once: groups of one
process follow each other, or the process waits for the next.
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
FIRST, MAIN, SOME, LAST = 0.25, 0.45, 0.2, 1.0
GRAPHS, TUNED = "reduce-overhead", "max-autotune"  # modes, in the names of cases


def plan(device: str, size: str, machine: dict[str, Any]) -> list[Group]:
    """The groups in the order in which they run. What is tuned takes minutes, and is last."""
    planned = list(_plan(device, size, machine))
    groups = [_without(group, (TUNED,)) for group in planned] + [_only(group, TUNED) for group in planned]
    return [group for group in groups if group.cases]


def _plan(device: str, size: str, machine: dict[str, Any]) -> Iterator[Group]:
    made = {part: groups(part, device, size, machine) for part in ("smoke", "flux", "swap", "nodes", "wan", "others")}
    allocators = len({group.process() for group in made["smoke"]})
    first, rest = made["smoke"][:allocators], made["smoke"][allocators:]
    yield from (replace(group, share=FIRST) for group in first)
    yield _of_one_process("flux", made)
    yield from (replace(_only(group, GRAPHS), share=SOME) for group in rest)
    yield from (replace(group, share=FIRST) for group in made["nodes"])
    yield from (replace(_only(group, "wan 1.3B, compiled, full"), share=SOME) for group in made["wan"])
    yield from (replace(_without(group, (GRAPHS,)), share=SOME) for group in rest)
    yield from (_only(group, "wan 14B", "wan, ") for group in made["wan"])
    yield from (_only(group, "qwen_image") for group in made["others"])
    yield from (_only(group, "core's Train LoRA") for group in made["others"])
    yield from (_only(group, "klein, compiled, none") for group in made["others"])
    yield from (_only(group, "KSampler") for group in reversed(made["swap"]))


def _of_one_process(model: str, made: dict[str, list[Group]]) -> Group:
    """FLUX's cases from several parts, on one MODEL."""
    by_name = {(part, _plain(case)): case for part in made for group in made[part] for case in group.cases}
    cases = tuple(by_name[name] for name in FLUX if name in by_name)
    return Group({"kind": "steps", "model": model}, cases, share=MAIN, timed=True)


def _plain(case: Case) -> str:
    return case.name.removesuffix(", swapped to fit")


def _only(group: Group, *texts: str) -> Group:
    return replace(group, cases=tuple(c for c in group.cases if any(text in c.name for text in texts)), share=LAST)


def _without(group: Group, texts: Sequence[str]) -> Group:
    return replace(group, cases=tuple(c for c in group.cases if not any(text in c.name for text in texts)))

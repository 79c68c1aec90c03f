"""Attributes that a function writes, by its bytecode, however the code writes them."""

from typing import Any

import pytest
from tessera.models.native.comfyui.sampling_writes import names_and_writes


class Model:
    def at_once(self, x: Any) -> Any:
        self.turn, self.kind, self.length = self.turn + 1, "next", getattr(self, "length", 0) + 1
        self.prompt = self.prompts["first"] = x
        self.calls += self.stride

    def in_containers(self, x: Any) -> Any:
        self.entries.setdefault(x, [self.zero])
        self.seen.add(x)
        self.cache[
            self.key
        ] = self.entry(
            x
        )  # fmt: skip
        del self.old[x]

    def by_another_name(self, x: Any) -> Any:
        slots, first = self.slots, x is None
        slots[0] = x
        width = self.width
        return first, width

    def nested(self) -> Any:
        def inner() -> None:
            self.deep = 1

        del self.gone
        return inner

    def reads(self, x: Any) -> Any:
        width = self.width
        return self.head(x[: self.rows].add(width)) + self.table[0]


@pytest.mark.parametrize(
    ("function", "assigned", "filled"),
    [
        (Model.at_once, {"turn", "kind", "length", "prompt", "calls"}, {"prompts"}),
        (Model.in_containers, set(), {"entries", "seen", "cache", "old"}),
        (Model.by_another_name, set(), {"slots"}),
        (Model.nested, {"deep", "gone"}, set()),
        (Model.reads, set(), set()),
    ],
)
def test_attributes_set_changed_or_deleted_are_found_and_those_read_are_not(function, assigned, filled):
    used, writes = names_and_writes(function.__code__)
    assert writes.assigned == assigned
    assert writes.filled >= filled
    assert assigned | filled <= used

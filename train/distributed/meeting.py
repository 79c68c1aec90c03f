"""Barrier of ranks on one key of their store: either all ranks continue, or none does."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

GRACE = 5.0  # seconds for a process that ends to report why
_LEFT = "left"


def patience(seconds: float, is_interrupted: Callable[[], bool]) -> Iterator[None]:
    """Yield repeatedly, with pauses, until the wait for other ranks ends.

    seconds: the longest wait; an interrupt shortens it to 2 · GRACE.
    """
    end, is_cut, pause = time.monotonic() + seconds, False, 0.0005
    while True:
        yield
        if not is_cut and is_interrupted():
            end, is_cut = min(end, time.monotonic() + 2 * GRACE), True
        if time.monotonic() > end:
            return
        time.sleep(pause)
        pause = min(0.002, 1.3 * pause)


class Unmet(Exception):
    """A rank has left a meeting before all ranks arrived.

    missing: ranks that have not arrived. leaving_rank: the rank that left. comes: it joins the next sum, to report why.
    """

    def __init__(self, missing: list[int], leaving_rank: int, comes: bool) -> None:
        super().__init__(missing, leaving_rank, comes)
        self.missing, self.leaving_rank, self.comes = missing, leaving_rank, comes


class Meeting:
    """One meeting: an entry of each rank that has arrived, and of the first one that left.

    The key is updated atomically, and no rank enters after one has left: so either all arrive, or none continues.
    """

    def __init__(self, store: Any, key: str, ranks: range, rank: int) -> None:
        """store: torch's key-value store. key: used by this meeting only. rank: this rank."""
        self.store, self.key, self.ranks, self.rank = store, key, ranks, rank

    def wait(
        self, value: Any, seconds: float, is_interrupted: Callable[[], bool], is_ready: Callable[[], bool] | None
    ) -> list[Any]:
        """Arrive when this rank is ready, and wait for all. Returns the ranks' values, in their order.

        value: plain JSON. Raises Unmet if a rank has left: this one leaves after `seconds`, or soon after an interrupt.
        """
        came = False
        for _ in patience(seconds, is_interrupted):
            if not came and (is_ready is None or is_ready()):
                came = True
                self._enter({str(self.rank): value})
            if (values := self.values()) is not None:
                return values
        self.leave(comes=False)
        values = self.values()
        assert values is not None
        return values

    def leave(self, comes: bool) -> None:
        """Let no rank continue, unless all have arrived. comes: this rank joins the next sum, to report why."""
        self._enter({_LEFT: [self.rank, comes]})

    def values(self) -> list[Any] | None:
        """Return the ranks' values, in their order; None until all have arrived. Raises Unmet if one has left."""
        entries = json.loads(self._text() or "{}")
        if not (missing := [rank for rank in self.ranks if str(rank) not in entries]):
            return [entries[str(rank)] for rank in self.ranks]
        if _LEFT in entries:
            raise Unmet(missing, *entries[_LEFT])
        return None

    def forget(self) -> None:
        """Delete the key; called by one rank, after all have read it."""
        self.store.delete_key(self.key)

    def _text(self) -> str:
        return self.store.get(self.key).decode() if self.store.check([self.key]) else ""

    def _enter(self, entry: dict[str, Any]) -> None:
        text = self._text()
        while _LEFT not in (entries := json.loads(text or "{}")):
            entered = json.dumps(entries | entry)
            text = self.store.compare_set(self.key, text, entered).decode()  # the other ranks' newer text on conflict
            if text == entered:
                return

"""Meeting of ranks by a key of their store: they go on all together, or not at all."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

GRACE = 5.0  # seconds in which a process that ends can still say why
_LEFT = "left"


def patience(seconds: float, is_interrupted: Callable[[], bool]) -> Iterator[None]:
    """Yield now and then for as long as others are waited for.

    seconds: the longest wait; an interrupt makes it short.
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
    """A rank has left a meeting to which not all have come.

    missing: ranks that have not come. left: the rank that left. comes: it comes to the next sum, to say why.
    """

    def __init__(self, missing: list[int], left: int, comes: bool) -> None:
        super().__init__(missing, left, comes)
        self.missing, self.left, self.comes = missing, left, comes


class Meeting:
    """One meeting: an entry of each rank that has come, or of the first one that left.

    The key changes as a whole, and nobody comes when one has left: so either all come, or none goes on.
    """

    def __init__(self, store: Any, key: str, ranks: range, rank: int) -> None:
        """store: torch's key-value store. key: of this meeting alone. rank: this one."""
        self.store, self.key, self.ranks, self.rank = store, key, ranks, rank

    def wait(
        self, value: Any, seconds: float, is_interrupted: Callable[[], bool], is_ready: Callable[[], bool] | None
    ) -> list[Any]:
        """Come when this rank is ready, and wait for all. Returns what each gave, in their order.

        value: plain JSON. Raises Unmet where a rank has left: this one does past `seconds`, or soon after an interrupt.
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
        """Let nobody go on from here, unless all have come. comes: this rank comes to the next sum, to say why."""
        self._enter({_LEFT: [self.rank, comes]})

    def values(self) -> list[Any] | None:
        """Return what each rank gave, in their order; None while not all have come. Raises Unmet where one has left."""
        here = json.loads(self._text() or "{}")
        if not (missing := [rank for rank in self.ranks if str(rank) not in here]):
            return [here[str(rank)] for rank in self.ranks]
        if _LEFT in here:
            raise Unmet(missing, *here[_LEFT])
        return None

    def forget(self) -> None:
        """Take the key away; for one rank alone, when all have read it."""
        self.store.delete_key(self.key)

    def _text(self) -> str:
        return self.store.get(self.key).decode() if self.store.check([self.key]) else ""

    def _enter(self, entry: dict[str, Any]) -> None:
        text = self._text()
        while _LEFT not in (here := json.loads(text or "{}")):
            entered = json.dumps(here | entry)
            text = self.store.compare_set(self.key, text, entered).decode()  # what another has entered meanwhile, or
            if text == entered:
                return

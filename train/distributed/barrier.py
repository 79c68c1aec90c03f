"""All-or-nothing barrier on a key of the ranks' store: if any rank times out, every rank leaves."""

import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store

GRACE = 5.0  # seconds for a process that ends to report why
_ABORTED = "aborted"


def poll(seconds: float, is_interrupted: Callable[[], bool]) -> Iterator[None]:
    """Yield repeatedly, with pauses, until the wait for other ranks ends.

    seconds: the longest wait; an interrupt shortens it to 2 · GRACE.
    """
    end = time.monotonic() + seconds
    is_cut = False
    pause = 0.0005
    while True:
        yield
        if not is_cut and is_interrupted():
            end, is_cut = min(end, time.monotonic() + 2 * GRACE), True
        if time.monotonic() > end:
            return
        time.sleep(pause)
        pause = min(0.002, 1.3 * pause)


class BrokenBarrier(Exception):
    """A rank has aborted a barrier before all ranks arrived.

    missing: ranks that have not arrived.
    aborting_rank: the rank that aborted it.
    joins_sum: True if that rank joins the next sum of gradients, to report why.
    """

    def __init__(self, missing: list[int], aborting_rank: int, joins_sum: bool) -> None:
        super().__init__(missing, aborting_rank, joins_sum)
        self.missing = missing
        self.aborting_rank = aborting_rank
        self.joins_sum = joins_sum


class Barrier:
    """Barrier that ranks pass once: an entry of each rank that has arrived, and of the first one that aborted it.

    The key is updated atomically, and no rank enters after one has aborted: so either all arrive, or none continues.
    """

    def __init__(self, store: "Store", key: str, ranks: range, rank: int) -> None:
        """store: torch's key-value store. key: used by this barrier only. rank: this rank."""
        self.store = store
        self.key = key
        self.ranks = ranks
        self.rank = rank

    def wait(
        self, value: object, seconds: float, is_interrupted: Callable[[], bool], is_ready: Callable[[], bool] | None
    ) -> list[Any]:
        """Arrive when this rank is ready, and wait for all. Returns the ranks' values, in their order.

        value: plain JSON. Raises BrokenBarrier if a rank has aborted: this one does after `seconds`, or soon after an
        interrupt.
        """
        has_arrived = False
        for _ in poll(seconds, is_interrupted):
            if not has_arrived and (is_ready is None or is_ready()):
                has_arrived = True
                self._enter({str(self.rank): value})
            if (values := self.values()) is not None:
                return values
        self.abort(joins_sum=False)
        values = self.values()
        assert values is not None
        return values

    def abort(self, joins_sum: bool) -> None:
        """Let no rank continue, unless all have arrived. joins_sum: this rank joins the next sum, to report why."""
        self._enter({_ABORTED: [self.rank, joins_sum]})

    def values(self) -> list[Any] | None:
        """Return the ranks' values, in their order; None until all have arrived. Raises BrokenBarrier."""
        entries = json.loads(self._text() or "{}")
        if not (missing := [rank for rank in self.ranks if str(rank) not in entries]):
            return [entries[str(rank)] for rank in self.ranks]
        if _ABORTED in entries:
            raise BrokenBarrier(missing, *entries[_ABORTED])
        return None

    def delete(self) -> None:
        """Delete the key; called by one rank, after all have read it."""
        self.store.delete_key(self.key)

    def _text(self) -> str:
        return self.store.get(self.key).decode() if self.store.check([self.key]) else ""

    def _enter(self, entry: dict[str, object]) -> None:
        text = self._text()
        while _ABORTED not in (entries := json.loads(text or "{}")):
            new_text = json.dumps(entries | entry)
            text = self.store.compare_set(self.key, text, new_text).decode()  # the other ranks' newer text on conflict
            if text == new_text:
                return

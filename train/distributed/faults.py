"""Faults and interrupts: why the ranks of a run end before its last step."""

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from comfy.model_management import InterruptProcessingException

from ..report.errors import CannotContinue
from .store import RunStore, Topic


@dataclass(frozen=True)
class Fault:
    """Report of the rank that ends a run.

    rank: that rank.
    host: its machine.
    cancelled: True if its user cancelled the run.
    sentence: the cause, for the user.
    """

    rank: int
    host: str
    cancelled: bool
    sentence: str


class Faults:
    """First fault of a run, which every rank can read; later faults follow from it and are not reported."""

    def __init__(self, rank: int, store: RunStore) -> None:
        """rank: this rank."""
        self.rank, self.store = rank, store

    def report(self, error: BaseException, sentence: str) -> None:
        """Report that this rank ends the run, unless another has already reported a fault.

        sentence: the cause, for the user.
        """
        with contextlib.suppress(RuntimeError):  # the store is gone with the launcher; the first error must propagate
            if self.first() is None:
                cancelled = isinstance(error, InterruptProcessingException | KeyboardInterrupt)
                self.store.set(Topic.FAULT, asdict(Fault(self.rank, socket.gethostname(), cancelled, sentence)))

    def first(self, seconds: float = 0.0) -> Fault | None:
        """Return the first fault, waiting up to `seconds` for it; None without one."""
        end = time.monotonic() + seconds
        while True:
            entries = self.store.get(Topic.FAULT)
            if entries is not None:
                return Fault(**entries)
            if time.monotonic() >= end:
                return None
            time.sleep(0.05)

    def exception(self, fault: Fault | None = None) -> BaseException:
        """Build the exception that ends this rank after another one ended the run: a cancel, or the cause on rank 0.

        Only rank 0 reports the cause to the user; the others would repeat it.
        """
        if self.rank != 0 or fault is None or fault.cancelled:
            return InterruptProcessingException()
        return CannotContinue(f"Device {fault.rank} on {fault.host} ended the run: {fault.sentence}")

    def missing_ranks_error(self, missing: Sequence[int], place: str, fault: Fault | None) -> BaseException:
        """Build the exception that ends this rank if others do not arrive.

        missing: the missing ranks, if known.
        place: the point that they did not reach.
        fault: the first fault; takes precedence if it is a cancel, comes from a missing rank, or no rank is known.
        """
        if fault is not None and (fault.cancelled or fault.rank in missing or not missing):
            return self.exception(fault)
        device = f"Device {missing[0]}" if missing else "Another device"
        return CannotContinue(
            f"{device} did not get to {place}: its process was killed, ran out of host memory, or hangs."
        )


class Interrupts:
    """Interrupts of this rank, such as Cancel. One may have to be kept while the other ranks rely on this rank."""

    def __init__(self) -> None:
        self._check: Callable[[], None] = lambda: None
        self._pending: BaseException | None = None

    def watch(self, check: Callable[[], None]) -> None:
        """Begin to watch for interrupts. check: raises one."""
        self._check, self._pending = check, None

    def check(self) -> None:
        """Raise a new interrupt at once."""
        self._check()

    def is_pending(self) -> bool:
        """Keep an interrupt for `raise_pending`; return whether there is one."""
        try:
            if self._pending is None:
                self._check()
        except BaseException as error:
            self._pending = error
        return self._pending is not None

    def keep(self, error: BaseException) -> None:
        """Keep this interrupt, which was raised elsewhere."""
        self._pending = error

    def raise_pending(self) -> None:
        """Raise the interrupt that was kept, once."""
        if self._pending is not None:
            error, self._pending = self._pending, None
            raise error

"""World of a run: its processes, one per device, and their communication."""

import contextlib
import json
import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from comfy.model_management import InterruptProcessingException
from torch import Tensor

from ..errors import CannotContinue, error_sentence
from .meeting import GRACE, Meeting, Unmet, patience

STEP_LIMIT = timedelta(minutes=30)  # longest wait of a device for the others within a step, compiling included
WAIT_LIMIT = 6 * 3600.0  # seconds, longest wait for the first device: longer than any preview or encoding
_FAULT = "fault"


class World:
    """Processes that train one LoRA together; a single process has no overhead.

    Each has a rank, and rank 0 writes all files, makes the previews and reports. They communicate through keys of a
    store, on which a wait may last as long as needed, and sum gradients by a collective, in which a process without the
    others would hang.

    store: torch's key-value store that all ranks reach; None for a single process.
    local_size: ranks on this host; local_rank: index of this rank among them, by default as torchrun numbers them.
    node: the ranks of this host that shard the model's blocks (`node.NodeRanks`), once they are connected.
    seconds_waited: seconds that this rank has waited for others, in sums and on keys.
    sums: number of collectives that it took part in.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, store: Any = None, local_size: int = 1, local_rank: int | None = None
    ):
        self.rank, self.size, self.store, self.local_size = rank, size, store, local_size
        self.local_rank = rank % local_size if local_rank is None else local_rank
        self.node: Any = None
        self.gathers_by_gloo = False  # only NCCL is fast enough; gloo is for tests of correctness
        self.step_limit, self.wait_limit = STEP_LIMIT, WAIT_LIMIT
        self.meets = False  # meet before each sum, as NCCL needs
        self.seconds_waited, self.sums = 0.0, 0
        self._runs, self._scope = 0, ""
        self.check_interrupted: Callable[[], None] = lambda: None
        self.interrupted: BaseException | None = None
        self._on_host: Tensor | None = None
        self._sum_events: tuple[Any, Any] | None = None

    @property
    def is_lone(self) -> bool:
        """Return whether this process trains alone."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Return whether this process writes files and reports."""
        return self.rank == 0

    def begin_run(self, check_interrupted: Callable[[], None]) -> None:
        """Begin a run with its own scope of keys, so that keys of earlier runs are not read.

        check_interrupted: called while this rank waits, and may raise.
        """
        self._runs, self.check_interrupted = self._runs + 1, check_interrupted
        self._scope = f"run{self._runs}/"
        self.seconds_waited, self.sums, self.interrupted = 0.0, 0, None

    def post(self, key: str, value: Any) -> None:
        """Write a key for the other ranks. value: plain JSON."""
        self.store.set(self._scope + key, json.dumps(value))

    def read(self, key: str) -> Any:
        """Return a key's value; None if no rank has written it."""
        return self._read(self._scope + key)

    def _read(self, name: str) -> Any:
        return json.loads(self.store.get(name)) if self.store.check([name]) else None

    def wait(self, key: str, is_it: Callable[[Any], bool] = lambda value: True) -> Any:
        """Wait for a key's value that satisfies `is_it`, and return it.

        Raises the exception of `stopped` if another rank ends the run meanwhile, and CannotContinue past the limit.
        """
        start, pause = time.monotonic(), 0.005
        try:
            while True:
                fault = self.fault()  # before the value, which a rank posts before it may end the run over another's
                value = self.read(key)
                if value is not None and is_it(value):
                    return value
                if fault is not None:
                    raise self.stopped(fault)
                self.check_interrupted()
                if time.monotonic() - start > self.wait_limit:
                    raise CannotContinue(f"Another device has not answered for {self.wait_limit:.0f} s.")
                time.sleep(pause)
                pause = min(0.1, 1.5 * pause)
        finally:
            self.seconds_waited += time.monotonic() - start

    def exchange(self, key: str, value: Any, ranks: range | None = None) -> list[Any]:
        """Return the values of the ranks, in their order. All of them must call it.

        key: unique in a run. value: plain JSON. ranks: participants, including this rank; None for all.
        """
        if self.is_lone:
            return [value]
        self.post(f"{key}/{self.rank}", [value])
        return [self.wait(f"{key}/{rank}")[0] for rank in ranks or range(self.size)]

    def agreed(self, key: str, value: Any) -> Any:
        """Return rank 0's value on every rank. value: plain JSON."""
        if self.is_first and not self.is_lone:
            self.post(key, value)
        return value if self.is_first else self.wait(key)

    def wait_for_first(self, step: int, due: bool) -> None:
        """Wait until rank 0 has finished its work after `step` steps, if any is `due`, as long as that takes."""
        if not self.is_lone and self.is_first:
            self.post("between", step)
        elif due and not self.is_first:
            self.wait("between", lambda done_step: bool(done_step >= step))

    @contextmanager
    def after_first(self, name: str, check_interrupted: Callable[[], None]) -> Iterator[None]:
        """Context that rank 0 executes first and the others after it, such as filling a cache that they read.

        name: unique in the lifetime of this process.
        """
        if self.is_lone:
            yield
            return
        self._scope, self.check_interrupted = "", check_interrupted
        try:
            if not self.is_first:
                self.wait(name)
            yield
        except BaseException as error:
            self.tell(error, error_sentence(error))
            raise
        if self.is_first:
            self.store.set(name, json.dumps(True))

    def tell(self, error: BaseException, sentence: str) -> None:
        """Report to the other ranks that this rank ends the run, unless another has already done so."""
        with contextlib.suppress(RuntimeError):  # the store is gone with the launcher; the first error must propagate
            if self.is_lone or self.fault() is not None:
                return
            cancelled = isinstance(error, InterruptProcessingException | KeyboardInterrupt)
            fault = {"rank": self.rank, "host": socket.gethostname(), "cancelled": cancelled, "why": sentence}
            self.store.set(_FAULT, json.dumps(fault))

    def fault(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """Return the rank that ended the run and the reason, waiting up to `seconds` for it; None without one."""
        end = time.monotonic() + seconds
        while True:
            fault: dict[str, Any] | None = self._read(_FAULT)
            if fault is not None or time.monotonic() >= end:
                return fault
            time.sleep(0.05)

    def stopped(self, fault: dict[str, Any] | None = None) -> BaseException:
        """Build the exception that ends this rank after another one ended the run: a cancel, or the cause on rank 0.

        Only rank 0 reports the cause to the user; the others would repeat it.
        """
        if not self.is_first or fault is None or fault["cancelled"]:
            return InterruptProcessingException()
        return CannotContinue(f"Device {fault['rank']} on {fault['host']} ended the run: {fault['why']}")

    def connect(self, device: torch.device) -> None:
        """Create the process group for sums once all ranks have arrived; a second call does nothing.

        The backend is NCCL if available, else gloo, which sums in host memory.
        """
        if self.is_lone or dist.is_initialized():
            return
        self.exchange("here", True)
        backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("sums", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=self.step_limit,
            device_id=device if backend == "nccl" else None,
        )

    def sum(self, buffer: Tensor, step: int) -> None:
        """Sum the ranks' buffers, (n,), in place; each rank gets the same bits.

        Raises CannotContinue or the exception of `stopped` if a rank is gone or does not arrive, and AcceleratorError
        if this rank's device has failed.
        """
        self.post(f"at/{self.rank}", step)
        start = time.monotonic()
        try:
            if self.meets or dist.get_backend() == "nccl":
                self._meet(buffer.device)
            if dist.get_backend() == "nccl":
                # Only queued: its duration on the device is known after the step's one host read.
                self._sum_events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self._sum_events[0].record()
                dist.all_reduce(buffer)
                self._sum_events[1].record()
            elif buffer.device.type == "cpu":
                self._sum_on_host(buffer)
            else:
                if self._on_host is None or self._on_host.shape != buffer.shape:
                    self._on_host = torch.empty(buffer.shape, dtype=buffer.dtype)
                self._on_host.copy_(buffer)
                self._sum_on_host(self._on_host)
                buffer.copy_(self._on_host)
        except (InterruptProcessingException, CannotContinue, torch.AcceleratorError):  # reported, or its own device
            raise
        except Exception as error:
            raise self._missing_rank_error(step, error.missing if isinstance(error, Unmet) else []) from error
        self.sums += 1
        self.seconds_waited += time.monotonic() - start

    def _sum_on_host(self, buffer: Tensor) -> None:
        """Sum by gloo. Handles an interrupt like `meet`, but the other ranks learn of it when this process ends."""
        work = dist.all_reduce(buffer, async_op=True)
        for _ in patience(math.inf, self._is_interrupted):  # gloo enforces the limit of a step
            if work.is_completed():
                work.wait()
                return
        self._raise_why()

    def _meet(self, device: torch.device) -> None:
        """Wait until all ranks have arrived at the next sum, see `meet`.

        NCCL only queues a sum, so a missing rank would be noticed only when nothing can be reported or saved any more.
        An error of another rank is no reason to leave: that rank joins this sum too, to report the error in it.
        """
        # A rank arrives once its gradients are complete and no gather of its blocks is in progress.
        try:
            events = [torch.cuda.current_stream(device).record_event()] if device.type == "cuda" else []
            events += [] if self.node is None or self.node.gathered is None else [self.node.gathered]
            self.meet("sum", self.sums + 1, None, is_ready=lambda: all(event.query() for event in events))
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the store is gone with the launcher
                self.leave_sum()  # a device error is raised here, as by any later call on the device
            if self.node is not None:
                self.node.abort()
            raise

    def meeting(self, name: str, number: int, ranks: range) -> Meeting:
        """Return a meeting of these ranks, see `meet`."""
        return Meeting(self.store, f"{self._scope}{name} {number}", ranks, self.rank)

    def meet(
        self, name: str, number: int, value: Any, ranks: range | None = None, is_ready: Callable[[], bool] | None = None
    ) -> list[Any]:
        """Wait until all of the ranks have arrived at a meeting; returns their values, in their order.

        They continue all together or not at all: if one stops waiting, none of them continues.

        name, number: of the meeting, counted from 1. value: plain JSON. ranks: those that meet; None for all.
        is_ready: this rank arrives once it returns True; None for immediately.

        An interrupt is kept for `raise_interrupted`, because the other ranks rely on this one. It is raised here if
        they do not arrive soon, unless one of them has reported a cause, since that ends processes too. Raises Unmet
        past the limit or if another rank has left, and any exception of `is_ready`; then the caller must leave the
        meeting.
        """
        ranks = ranks or range(self.size)
        try:
            limit = self.step_limit.total_seconds()
            values = self.meeting(name, number, ranks).wait(value, limit, self._is_interrupted, is_ready)
        except Unmet as unmet:
            if unmet.leaving_rank == self.rank:
                self._raise_why()
            raise
        if self.rank == ranks[0] and number > 1:  # all ranks here have read the previous one
            self.meeting(name, number - 1, ranks).forget()
        return values

    def leave_sum(self) -> None:
        """Release the ranks that wait for this one at the next sum, which it can't join; no effect if all have met."""
        self.meeting("sum", self.sums + 1, range(self.size)).leave(comes=False)

    def _is_interrupted(self) -> bool:
        """Keep an interrupt for `raise_interrupted`; return whether there is one."""
        try:
            if self.interrupted is None:
                self.check_interrupted()
        except BaseException as error:
            self.interrupted = error
        return self.interrupted is not None

    def count_sum(self) -> None:
        """Add the device time of the last sum to `seconds_waited`; it is complete, as the host has read its result.

        Raises the exception that interrupted this rank while it waited for the others.
        """
        if self._sum_events is not None:
            start, end = self._sum_events
            self.seconds_waited, self._sum_events = self.seconds_waited + start.elapsed_time(end) / 1000, None
        self.raise_interrupted()

    def _raise_why(self) -> None:
        """Raise the exception that interrupted this rank, or the cause if another rank has reported one."""
        if (fault := self.fault()) is not None and not fault["cancelled"]:
            raise self.stopped(fault)
        self.raise_interrupted()

    def raise_interrupted(self) -> None:
        """Raise the exception that interrupted this rank while others relied on it."""
        if self.interrupted is not None:
            error, self.interrupted = self.interrupted, None
            raise error

    def _missing_rank_error(self, step: int, missing: list[int]) -> BaseException:
        """Build the exception for a sum with missing ranks, known from their meeting, else from their posted steps."""
        # Name this rank itself last: its queued work may be waiting for a collective that another rank did not join.
        missing = sorted(missing, key=lambda rank: rank == self.rank)
        try:
            fault = self.fault(GRACE)  # read first: the rank that reports it may itself be late for this sum
            missing = missing or [rank for rank in range(self.size) if (self.read(f"at/{rank}") or 0) < step]
        except Exception:  # the store is gone with the launcher
            fault = None
        return self.unreached_error(missing, f"the end of step {step}", fault)

    def unreached_error(self, missing: list[int], place: str, fault: dict[str, Any] | None) -> BaseException:
        """Build the exception that ends this rank if others do not arrive.

        missing: the missing ranks, if known.
        place: the point that they did not reach.
        fault: result of `fault`; takes precedence if it is a cancel, comes from a missing rank, or no rank is known.
        """
        if fault is not None and (fault["cancelled"] or fault["rank"] in missing or not missing):
            return self.stopped(fault)
        device = f"Device {missing[0]}" if missing else "Another device"
        return CannotContinue(
            f"{device} did not get to {place}: its process was killed, ran out of host memory, or hangs."
        )

    def facts(self) -> dict[str, Any]:
        """Return entries for the summary: the number of devices, and the seconds that rank 0 waited for others."""
        return {} if self.is_lone else {"world_size": self.size, "seconds_waiting": round(self.seconds_waited, 3)}


LONE = World()

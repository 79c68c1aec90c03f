"""World of a run: its processes, one for each device, and what they tell each other."""

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

STEP_LIMIT = timedelta(minutes=30)  # longest that a device waits for the others within a step, compiling included
WAIT_LIMIT = 6 * 3600.0  # seconds that a device waits for the first one: longer than any preview or encoding
_FAULT = "fault"


class World:
    """Processes that train one LoRA together; alone, nothing here costs anything.

    Each has a rank, and rank 0 writes all files, makes the previews and reports. They tell each other by keys of a
    store, which may be waited on without end, and sum gradients by a collective, in which one process without the
    others would be stuck.

    store: torch's key-value store that all ranks reach; None alone.
    local_size: ranks on this host; local_rank: number of this one among them, by default as torchrun numbers them.
    node: the ranks of this host that share the model's blocks (`node.NodeRanks`), once they are connected.
    waited: seconds that this rank has waited for others, in sums and on keys.
    sums: collectives that it took part in.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, store: Any = None, local_size: int = 1, local_rank: int | None = None
    ):
        self.rank, self.size, self.store, self.local_size = rank, size, store, local_size
        self.local_rank = rank % local_size if local_rank is None else local_rank
        self.node: Any = None
        self.gathers_by_gloo = False  # NCCL alone is worth it, and gloo shows that it is right
        self.step_limit, self.wait_limit = STEP_LIMIT, WAIT_LIMIT
        self.meets = False  # before each sum, as NCCL needs
        self.waited, self.sums = 0.0, 0
        self._runs, self._scope = 0, ""
        self.check_interrupted: Callable[[], None] = lambda: None
        self.interrupted: BaseException | None = None
        self._on_host: Tensor | None = None
        self._sum_events: tuple[Any, Any] | None = None

    @property
    def is_lone(self) -> bool:
        """True where this process trains alone."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """True for the process that writes and reports."""
        return self.rank == 0

    def begin_run(self, check_interrupted: Callable[[], None]) -> None:
        """Begin a run: keys of the runs before it are not read any more.

        check_interrupted: is called while this rank waits, and may raise.
        """
        self._runs, self.check_interrupted = self._runs + 1, check_interrupted
        self._scope = f"run{self._runs}/"
        self.waited, self.sums, self.interrupted = 0.0, 0, None

    def post(self, key: str, value: Any) -> None:
        """Write a key for the others. value: plain JSON."""
        self.store.set(self._scope + key, json.dumps(value))

    def read(self, key: str) -> Any:
        """Return a key's value; None where nobody has written it."""
        return self._read(self._scope + key)

    def _read(self, name: str) -> Any:
        return json.loads(self.store.get(name)) if self.store.check([name]) else None

    def wait(self, key: str, is_it: Callable[[Any], bool] = lambda value: True) -> Any:
        """Return a key's value as soon as it is written and is what is waited for.

        Raises what `stopped` makes where another rank ends the run meanwhile, and CannotContinue past the limit.
        """
        begun, pause = time.monotonic(), 0.005
        try:
            while True:
                fault = self.fault()  # before the value, which a rank gives before it may end the run over another's
                value = self.read(key)
                if value is not None and is_it(value):
                    return value
                if fault is not None:
                    raise self.stopped(fault)
                self.check_interrupted()
                if time.monotonic() - begun > self.wait_limit:
                    raise CannotContinue(f"Another device has not answered for {self.wait_limit:.0f} s.")
                time.sleep(pause)
                pause = min(0.1, 1.5 * pause)
        finally:
            self.waited += time.monotonic() - begun

    def exchange(self, key: str, value: Any, ranks: range | None = None) -> list[Any]:
        """Return what each of the ranks gives, in their order. All of them have to call it.

        key: once in a run. value: plain JSON. ranks: those that take part, with this one; None for all.
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
        """Wait, where something is `due` after `step` steps, until rank 0 has done it, as long as that takes."""
        if not self.is_lone and self.is_first:
            self.post("between", step)
        elif due and not self.is_first:
            self.wait("between", lambda at: bool(at >= step))

    @contextmanager
    def after_first(self, name: str, check_interrupted: Callable[[], None]) -> Iterator[None]:
        """Let rank 0 do within what the others do when it has, such as filling a cache that they read.

        name: once in the life of this process.
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
        """Tell the others that this rank ends the run, unless one has done so before."""
        with contextlib.suppress(RuntimeError):  # the store went with the launcher, and the error has to come through
            if self.is_lone or self.fault() is not None:
                return
            cancelled = isinstance(error, InterruptProcessingException | KeyboardInterrupt)
            fault = {"rank": self.rank, "host": socket.gethostname(), "cancelled": cancelled, "why": sentence}
            self.store.set(_FAULT, json.dumps(fault))

    def fault(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """Return who ended the run and why, waiting these seconds for it; None while nobody has."""
        end = time.monotonic() + seconds
        while True:
            found: dict[str, Any] | None = self._read(_FAULT)
            if found is not None or time.monotonic() >= end:
                return found
            time.sleep(0.05)

    def stopped(self, fault: dict[str, Any] | None = None) -> BaseException:
        """Make the exception that ends this rank where another one ended the run: a cancel, or, on rank 0, the cause.

        Only rank 0 has somebody to tell the cause to, whom the others would tell the same.
        """
        if not self.is_first or fault is None or fault["cancelled"]:
            return InterruptProcessingException()
        return CannotContinue(f"Device {fault['rank']} on {fault['host']} ended the run: {fault['why']}")

    def connect(self, device: torch.device) -> None:
        """Connect the ranks for sums, when all of them are there; the second call does nothing.

        NCCL where it is there, else gloo, which sums in host memory.
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
        """Add up the ranks' buffers, (n,), in place; each gets the same bits.

        Raises CannotContinue, or what `stopped` makes, where a rank is gone or does not come, and AcceleratorError
        where this rank's device has failed.
        """
        self.post(f"at/{self.rank}", step)
        begun = time.monotonic()
        try:
            if self.meets or dist.get_backend() == "nccl":
                self._meet(buffer.device)
            if dist.get_backend() == "nccl":
                # Queued only: how long it took on the device is known behind the step's one read.
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
        except (InterruptProcessingException, CannotContinue, torch.AcceleratorError):  # told, or of its own device
            raise
        except Exception as error:
            raise self._lost(step, error.missing if isinstance(error, Unmet) else []) from error
        self.sums += 1
        self.waited += time.monotonic() - begun

    def _sum_on_host(self, buffer: Tensor) -> None:
        """Sum by gloo. An interrupt is treated as `meet` does, but the others learn of it when this process ends."""
        work = dist.all_reduce(buffer, async_op=True)
        for _ in patience(math.inf, self._is_interrupted):  # gloo has the limit of a step
            if work.is_completed():
                work.wait()
                return
        self._raise_why()

    def _meet(self, device: torch.device) -> None:
        """Wait until all ranks have come to the next sum, see `meet`.

        NCCL only queues a sum, and a rank that does not come would be noticed where nothing can be said or saved any
        more. An error of another rank is no reason to leave: that rank comes to this sum too, to say so in it.
        """
        # A rank has come when its gradients are there, and no gather of its blocks is under way.
        try:
            events = [torch.cuda.current_stream(device).record_event()] if device.type == "cuda" else []
            events += [] if self.node is None or self.node.gathered is None else [self.node.gathered]
            self.meet("sum", self.sums + 1, None, is_ready=lambda: all(event.query() for event in events))
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the store went with the launcher
                self.leave_sum()  # an error of the device is found here, as it is by whatever asks it next
            if self.node is not None:
                self.node.abort()
            raise

    def meeting(self, name: str, number: int, ranks: range) -> Meeting:
        """Return a meeting of these ranks, see `meet`."""
        return Meeting(self.store, f"{self._scope}{name} {number}", ranks, self.rank)

    def meet(
        self, name: str, number: int, value: Any, ranks: range | None = None, is_ready: Callable[[], bool] | None = None
    ) -> list[Any]:
        """Wait until all of the ranks have come to a meeting; returns what each gives, in their order.

        They go on all together or not at all: where one does not wait any longer, none of them does.

        name, number: of the meeting, counted from 1. value: plain JSON. ranks: those that meet; None for all.
        is_ready: this rank comes when it is True; None for at once.

        An interrupt is kept for `raise_interrupted`, as the others count on this rank, and raised here where they do
        not come soon, unless one of them has told why: that ends processes too. Raises Unmet past the limit, or where
        another rank has left, and what `is_ready` raises; then the caller has to leave the meeting.
        """
        ranks = ranks or range(self.size)
        try:
            limit = self.step_limit.total_seconds()
            values = self.meeting(name, number, ranks).wait(value, limit, self._is_interrupted, is_ready)
        except Unmet as unmet:
            if unmet.left == self.rank:
                self._raise_why()
            raise
        if self.rank == ranks[0] and number > 1:  # all have read it that have come here
            self.meeting(name, number - 1, ranks).forget()
        return values

    def leave_sum(self) -> None:
        """Let nobody wait for this rank before the next sum, to which it can't come; nothing where they have met."""
        self.meeting("sum", self.sums + 1, range(self.size)).leave(comes=False)

    def _is_interrupted(self) -> bool:
        """Keep an interrupt for `raise_interrupted`; True when there is one."""
        try:
            if self.interrupted is None:
                self.check_interrupted()
        except BaseException as error:
            self.interrupted = error
        return self.interrupted is not None

    def count_sum(self) -> None:
        """Count the time of the last sum on the device, which is over: the host has read what it gave.

        Raises what interrupted this rank while it waited for the others.
        """
        if self._sum_events is not None:
            begun, ended = self._sum_events
            self.waited, self._sum_events = self.waited + begun.elapsed_time(ended) / 1000, None
        self.raise_interrupted()

    def _raise_why(self) -> None:
        """Raise what interrupted this rank, or its cause where another one has told it."""
        if (fault := self.fault()) is not None and not fault["cancelled"]:
            raise self.stopped(fault)
        self.raise_interrupted()

    def raise_interrupted(self) -> None:
        """Raise what interrupted this rank while it waited for others that counted on it."""
        if self.interrupted is not None:
            error, self.interrupted = self.interrupted, None
            raise error

    def _lost(self, step: int, missing: list[int]) -> BaseException:
        """Say who is missing from a sum: as their meeting knows it, else by what each has told of its place."""
        # Of several, this rank itself last: what it has queued may be behind what another does not give.
        missing = sorted(missing, key=lambda rank: rank == self.rank)
        try:
            fault = self.fault(GRACE)  # before that: who told of it may be late here too
            missing = missing or [rank for rank in range(self.size) if (self.read(f"at/{rank}") or 0) < step]
        except Exception:  # the store went with the launcher
            fault = None
        return self.gone(missing, f"the end of step {step}", fault)

    def gone(self, missing: list[int], where: str, fault: dict[str, Any] | None) -> BaseException:
        """Make the exception that ends this rank where others do not come.

        missing: those, as far as known. where: what they did not come to. fault: as `fault` gives it; that one of them
        has told why, or a rank was cancelled, counts for more.
        """
        if fault is not None and (fault["cancelled"] or fault["rank"] in missing or not missing):
            return self.stopped(fault)
        who = f"Device {missing[0]}" if missing else "Another device"
        return CannotContinue(
            f"{who} did not get to {where}: its process was killed, ran out of host memory, or hangs."
        )

    def facts(self) -> dict[str, Any]:
        """Return entries for the summary: the number of devices, and the seconds that rank 0 has waited for others."""
        return {} if self.is_lone else {"world_size": self.size, "seconds_waiting": round(self.waited, 3)}


LONE = World()

"""Collectives of a run's ranks: barriers, and the sum of gradients by torch.distributed."""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from comfy.model_management import InterruptProcessingException
from torch import Tensor

from ..report.errors import CannotContinue
from .barrier import GRACE, Barrier, BrokenBarrier, poll
from .faults import Faults, Interrupts
from .store import RunStore, Topic


@dataclass(frozen=True)
class WorldOptions:
    """Limits of waiting, and ways of communication that tests choose.

    step_timeout: longest wait of a rank for the others within a step, compiling included.
    first_timeout: longest wait for rank 0 in seconds: longer than any preview or encoding.
    barrier_before_sum: pass a barrier before each sum by gloo too, as NCCL needs.
    gloo_gathers: allow to shard blocks over gloo, which is too slow for anything but tests.
    """

    step_timeout: timedelta = timedelta(minutes=30)
    first_timeout: float = 6 * 3600.0
    barrier_before_sum: bool = False
    gloo_gathers: bool = False


class WaitTime:
    """Seconds that this rank has waited for others, in sums and for their messages."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def begin_run(self) -> None:
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.seconds += seconds


class GatheringRanks(Protocol):
    """Ranks of a machine that gather shards of blocks in a process group of their own.

    gathered: event recorded after the last queued gather; None on a CPU.
    """

    gathered: torch.cuda.Event | None

    def abort_gathers(self) -> None:
        """Abort the queued gathers."""
        ...


class Collectives:
    """Collectives of a run that all ranks take part in.

    sums: number of sums that this rank took part in.
    node: the ranks of this machine that shard the model's blocks, once they are connected.
    """

    def __init__(
        self,
        ranks: range,
        store: RunStore,
        faults: Faults,
        interrupts: Interrupts,
        wait_time: WaitTime,
        options: WorldOptions,
    ) -> None:
        """ranks: all ranks of the run."""
        self.ranks = ranks
        self.rank = faults.rank
        self.options = options
        self.store = store
        self.faults = faults
        self.interrupts = interrupts
        self.wait_time = wait_time
        self.node: GatheringRanks | None = None
        self.sums = 0
        self._host_buffer: Tensor | None = None
        self._sum_events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def begin_run(self) -> None:
        """Begin a run: all ranks restart the count of sums."""
        self.sums = 0

    def connect(self, device: torch.device) -> None:
        """Create the process group for sums; all ranks must have arrived. A second call does nothing.

        The backend is NCCL if available, else gloo, which sums in host memory.
        """
        if dist.is_initialized():
            return
        backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("sums", self.store.torch_store),
            rank=self.rank,
            world_size=len(self.ranks),
            timeout=self.options.step_timeout,
            device_id=device if backend == "nccl" else None,
        )

    def attach(self, node: GatheringRanks) -> None:
        """Have sums wait for the gathers of these ranks, whose blocks this rank shares."""
        self.node = node

    def all_reduce(self, buffer: Tensor, step: int) -> None:
        """Sum the ranks' buffers, (n,), in place; each rank gets the same bits.

        Raises CannotContinue or the exception of `Faults.exception` if a rank is gone or does not arrive, and
        AcceleratorError if this rank's device has failed.
        """
        self.store.set(Topic.SUMMED_STEP, step, str(self.rank))
        start = time.monotonic()
        try:
            if self.options.barrier_before_sum or dist.get_backend() == "nccl":
                self._barrier_before_sum(buffer.device)
            if dist.get_backend() == "nccl":
                # Only queued: its duration on the device is known after the step's one host read.
                self._sum_events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self._sum_events[0].record()
                dist.all_reduce(buffer)
                self._sum_events[1].record()
            elif buffer.device.type == "cpu":
                self._all_reduce_on_host(buffer)
            else:
                if self._host_buffer is None or self._host_buffer.shape != buffer.shape:
                    self._host_buffer = torch.empty(buffer.shape, dtype=buffer.dtype)
                self._host_buffer.copy_(buffer)
                self._all_reduce_on_host(self._host_buffer)
                buffer.copy_(self._host_buffer)
        except (InterruptProcessingException, CannotContinue, torch.AcceleratorError):  # reported, or its own device
            raise
        except Exception as error:
            missing = error.missing if isinstance(error, BrokenBarrier) else []
            raise self._missing_from_sum(step, missing) from error
        self.sums += 1
        self.wait_time.add(time.monotonic() - start)

    def end_sum(self) -> None:
        """Count the device time of the last sum as waiting; it is complete, as the host has read its result.

        Raises the exception that interrupted this rank while it waited for the others.
        """
        if self._sum_events is not None:
            start, end = self._sum_events
            self.wait_time.add(start.elapsed_time(end) / 1000)
            self._sum_events = None
        self.interrupts.raise_pending()

    def abort_sum(self) -> None:
        """Release the ranks that wait for this one at the next sum, which it can't join.

        No effect if all have arrived.
        """
        self.barrier_at("sum", self.sums + 1, self.ranks).abort(joins_sum=False)

    def barrier(
        self, name: str, number: int, value: object, ranks: range, is_ready: Callable[[], bool] | None = None
    ) -> list[Any]:
        """Wait until all of the ranks have arrived at a barrier; returns their values, in their order.

        All-or-nothing: if any rank stops waiting, none of them continues.

        name, number: of the barrier, counted from 1.
        value: plain JSON.
        ranks: those that pass it.
        is_ready: this rank arrives once it returns True; None for immediately.

        An interrupt is kept for `Interrupts.raise_pending`, because the other ranks rely on this one. It is raised here
        if they do not arrive soon, unless one of them has reported a cause, since that ends processes too. Raises
        BrokenBarrier past the limit or if another rank has aborted, and any exception of `is_ready`; then the caller
        must abort the barrier.
        """
        try:
            limit = self.options.step_timeout.total_seconds()
            barrier = self.barrier_at(name, number, ranks)
            values = barrier.wait(value, limit, self.interrupts.is_pending, is_ready)
        except BrokenBarrier as broken:
            if broken.aborting_rank == self.rank:
                self._raise_cause()
            raise
        if self.rank == ranks[0] and number > 1:  # all ranks here have read the previous one
            self.barrier_at(name, number - 1, ranks).delete()
        return values

    def barrier_at(self, name: str, number: int, ranks: range) -> Barrier:
        """Return a barrier of these ranks, see `barrier`."""
        return Barrier(self.store.torch_store, self.store.key(Topic.BARRIER, f"{name} {number}"), ranks, self.rank)

    def _barrier_before_sum(self, device: torch.device) -> None:
        """Wait until all ranks have arrived at the next sum.

        NCCL only queues a sum, so a missing rank would be noticed only when nothing can be reported or saved any more.
        An error of another rank is no reason to abort: that rank joins this sum too, to report the error in it.
        """
        # A rank arrives once its gradients are complete and no gather of its blocks is in progress.
        try:
            events = [torch.cuda.current_stream(device).record_event()] if device.type == "cuda" else []
            if self.node is not None and self.node.gathered is not None:
                events.append(self.node.gathered)
            self.barrier("sum", self.sums + 1, None, self.ranks, lambda: all(event.query() for event in events))
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the store is gone with the launcher
                self.abort_sum()  # a device error is raised here, as by any later call on the device
            if self.node is not None:
                self.node.abort_gathers()
            raise

    def _all_reduce_on_host(self, buffer: Tensor) -> None:
        """Sum by gloo. Keeps an interrupt as `barrier` does, but other ranks learn of it when this process ends."""
        work = dist.all_reduce(buffer, async_op=True)
        for _ in poll(math.inf, self.interrupts.is_pending):  # gloo enforces the limit of a step
            if work.is_completed():
                work.wait()
                return
        self._raise_cause()

    def _raise_cause(self) -> None:
        """Raise the exception that interrupted this rank, or the cause if another rank has reported one."""
        if (fault := self.faults.first()) is not None and not fault.cancelled:
            raise self.faults.exception(fault)
        self.interrupts.raise_pending()

    def _missing_from_sum(self, step: int, missing: list[int]) -> BaseException:
        """Build the exception for a sum with missing ranks, known from their barrier, else from their steps."""
        # Name this rank itself last: its queued work may be waiting for a collective that another rank did not join.
        missing = sorted(missing, key=lambda rank: rank == self.rank)
        try:
            fault = self.faults.first(GRACE)  # read first: the rank that reports it may itself be late for this sum
            missing = missing or [
                rank for rank in self.ranks if (self.store.get(Topic.SUMMED_STEP, str(rank)) or 0) < step
            ]
        except Exception:  # the store is gone with the launcher
            fault = None
        return self.faults.missing_ranks_error(missing, f"the end of step {step}", fault)

"""Staged copies of host weights to the device, through page-locked stages that a background thread fills.

Copies from page-locked memory overlap with computation, copies from pageable memory do not. If the weights themselves
are not page-locked, a background thread fills a small page-locked stage, block after block.
"""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from .flat_buffer import ScatteredBuffer
from .page_locked import give_back, host_bytes, unlock

STAGES = 2  # one is filled while the other is copied
TRIAL_BYTES = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}
LEAST_TRIAL_BYTES = 16 * 2**20


class Link(Protocol):
    """Transfer from a stage into a slot: a separate stream on a GPU, a slow fake in tests."""

    def mark(self) -> Any:
        """Return a marker of all work queued so far; called by the computing thread."""
        ...

    def send(self, slot: Tensor, source: Tensor, mark: Any, after_copy: Callable[[], None] | None) -> Any:
        """Copy after the work before `mark`, then call `after_copy`; returns an event without waiting for the copy.

        slot, source: (n,) uint8.
        """
        ...

    def finished(self, event: Any) -> None:
        """Block the calling thread until `source` may be written again."""
        ...

    def order(self, event: Any) -> None:
        """Make all work queued from here on wait for the copy."""
        ...

    def settle(self) -> None:
        """Block the calling thread until all copies sent are done."""
        ...


class CudaLink:
    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()

    def send(self, slot: Tensor, source: Tensor, mark: Any, after_copy: Callable[[], None] | None) -> torch.cuda.Event:
        self.stream.wait_event(mark)
        with torch.cuda.stream(self.stream):
            slot.copy_(source, non_blocking=True)
            if after_copy is not None:
                after_copy()
            return self.stream.record_event()

    def finished(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def order(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def settle(self) -> None:
        self.stream.synchronize()


class HostLink:
    """Synchronous copies within the host: the caller has already computed everything before the mark."""

    def mark(self) -> None:
        pass

    def send(self, slot: Tensor, source: Tensor, mark: Any, after_copy: Callable[[], None] | None) -> None:
        slot.copy_(source)
        if after_copy is not None:
            after_copy()

    def finished(self, event: Any) -> None:
        pass

    def order(self, event: Any) -> None:
        pass

    def settle(self) -> None:
        pass


class StagedStream:
    """Copies flat weights to the device from a background thread; a slot ring uses it as its stream.

    Pageable weights go through `stages` page-locked buffers, each refilled as soon as the copy out of it is done.
    Scattered ones are gathered in the stage, so only this thread waits for pages of a mapped file. Page-locked weights
    are copied directly. So the computing thread waits for no event, nor for anything that follows a copy, such as a
    LoRA whose factors come from pageable memory. At a block's turn it waits until the copy has been started, as only
    then does an event exist for the device to wait for.
    """

    def __init__(self, link: Link, stage_bytes: int, stages: int = STAGES, pinned: bool = True):
        self.link = link
        self.stages: list[Tensor] = []  # allocated when weights first need one
        self._stage_bytes, self._pinned = stage_bytes, pinned
        self._leaving: list[Any] = [None] * stages  # the event of the last copy out of each stage
        self._turn = 0
        self._ended = False
        self._behind: Future[int] | None = None  # done once the worker has released the last copy
        self._thread: int | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tessera-stage")

    def copy(
        self, slot: Tensor, host: Tensor | ScatteredBuffer, after_copy: Callable[[], None] | None
    ) -> "Future[Any]":
        """Copy after all work queued so far, then call `after_copy`; returns the argument for `wait`.

        slot: (n,) uint8.
        """
        assert not self._ended
        mode = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        if not self.stages and not host.is_pinned():
            self.stages = [host_bytes(self._stage_bytes, self._pinned) for _ in self._leaving]
        copied = self._worker.submit(self._send, slot, host, self.link.mark(), after_copy, mode)
        # Submitted here and not in `settle`, which a finaliser may call wherever the garbage collector runs: `submit`
        # takes a lock that all executors share, so inside another executor's `submit` it would deadlock.
        self._behind = self._worker.submit(int)
        return copied

    def _send(
        self,
        slot: Tensor,
        host: Tensor | ScatteredBuffer,
        mark: Any,
        after_copy: Callable[[], None] | None,
        mode: tuple[bool, bool],
    ) -> Any:
        self._thread = threading.get_ident()
        if self._ended:
            return None
        target = slot[: host.numel()]
        try:
            # Both modes are thread-local; `after_copy` has to run under those of the calling thread.
            with torch.inference_mode(mode[0]), torch.set_grad_enabled(mode[1]):
                if isinstance(host, Tensor) and host.is_pinned():
                    return self.link.send(target, host, mark, after_copy)
                stage = self._turn % len(self.stages)
                self._turn += 1
                if self._leaving[stage] is not None:
                    self.link.finished(self._leaving[stage])
                source = self.stages[stage][: host.numel()]
                source.copy_(host) if isinstance(host, Tensor) else host.copy_to(source)
                self._leaving[stage] = self.link.send(target, source, mark, after_copy)
                return self._leaving[stage]
        finally:
            if self._ended:  # `target` holds the last reference to its slot
                self.link.settle()

    def wait(self, copied: "Future[Any] | None") -> None:
        """Make all work queued from here on wait for that copy. Raises errors of the background thread."""
        if copied is None:
            return
        try:
            event = copied.result()
        except BaseException:
            # The error's traceback holds its frames and the tensors in them: only the handler may hold the error, not
            # this frame nor the thread.
            del copied
            self.settle()
            raise
        self.link.order(event)

    def settle(self) -> None:
        """Block until every requested copy is done or has failed: then slots may be freed."""
        if threading.get_ident() == self._thread:
            # The owner of the slots was collected on this thread, which can't wait for itself. Send nothing further.
            self._ended = True
        elif self._behind is not None:
            behind, self._behind = self._behind, None
            behind.result()
        self.link.settle()

    def release(self) -> None:
        """Settle, and free the stages until they are needed again."""
        self.settle()
        if not self._ended:
            unlocked = all([unlock(stage) for stage in self.stages])
            self.stages = []
            self._leaving = [None] * len(self._leaving)
            if not unlocked:
                give_back()


def staged_stream(
    flat_weights: Sequence[Tensor | ScatteredBuffer], device: torch.device, finished: bool = False
) -> StagedStream | None:
    """Choose the stream for flat weights; None if plain copies are as good.

    It is needed if not all are page-locked, or if a callback (`finished`) follows each copy on the device.
    """
    largest = max(weights.numel() for weights in flat_weights)
    if device.type == "cuda":
        plain = not finished and all(weights.is_pinned() for weights in flat_weights)
        return None if plain else StagedStream(CudaLink(device), largest)
    if all(isinstance(weights, Tensor) for weights in flat_weights):
        return None
    return StagedStream(HostLink(), largest, pinned=False)


@functools.cache
def link_bandwidth(device: torch.device) -> float:
    """Measure bytes per second from page-locked host memory to the device, the best of three copies.

    Without a GPU, copies within host memory are measured.
    """
    size = TRIAL_BYTES.get(device.type, TRIAL_BYTES["cpu"])
    device_buffer = _trial_buffer(size, device)
    host = host_bytes(len(device_buffer), device.type == "cuda").fill_(1)
    seconds = min(_copy_seconds(device_buffer, host) for _ in range(3))
    if not unlock(host):
        del host
        give_back()
    return len(device_buffer) / seconds


def _trial_buffer(size: int, device: torch.device) -> Tensor:
    """Allocate `size` bytes on the device, or fewer if it is nearly full."""
    while True:
        try:
            return torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            if size <= LEAST_TRIAL_BYTES:
                raise
        size //= 4


def _copy_seconds(device_buffer: Tensor, host: Tensor) -> float:
    if device_buffer.device.type == "cuda":
        torch.cuda.synchronize(device_buffer.device)
    started = time.perf_counter()
    device_buffer.copy_(host, non_blocking=True)
    if device_buffer.device.type == "cuda":
        torch.cuda.synchronize(device_buffer.device)
    return time.perf_counter() - started

"""Staged copies: host weights reach the device through page-locked stages that a thread fills.

Copies from page-locked memory overlap with computation, copies from pageable memory do not. Where the weights
themselves are not page-locked, a small page-locked stage is filled by a thread of its own, block after block.
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
    """Transfer from a stage into a slot: on a GPU a stream of its own, in tests a slow one."""

    def mark(self) -> Any:
        """Return a marker of everything computed so far; called by the thread that computes."""
        ...

    def send(self, slot: Tensor, source: Tensor, mark: Any, then: Callable[[], None] | None) -> Any:
        """Copy after what `mark` stands for, then call `then`; returns an event without waiting for the copy."""
        ...

    def finished(self, event: Any) -> None:
        """Block the calling thread until `source` may be written again."""
        ...

    def order(self, event: Any) -> None:
        """Let everything computed from here on start after the copy."""
        ...

    def settle(self) -> None:
        """Block the calling thread until everything that was sent is done."""
        ...


class CudaLink:
    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()

    def send(self, slot: Tensor, source: Tensor, mark: Any, then: Callable[[], None] | None) -> torch.cuda.Event:
        self.stream.wait_event(mark)
        with torch.cuda.stream(self.stream):
            slot.copy_(source, non_blocking=True)
            if then is not None:
                then()
            return self.stream.record_event()

    def finished(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def order(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def settle(self) -> None:
        self.stream.synchronize()


class HostLink:
    """Copies within the host, at once: whoever asks for one has computed all that it stands for."""

    def mark(self) -> None:
        pass

    def send(self, slot: Tensor, source: Tensor, mark: Any, then: Callable[[], None] | None) -> None:
        slot.copy_(source)
        if then is not None:
            then()

    def finished(self, event: Any) -> None:
        pass

    def order(self, event: Any) -> None:
        pass

    def settle(self) -> None:
        pass


class StagedStream:
    """Copies flat weights to the device from a thread of its own; a ring takes it as its stream.

    Pageable weights go through `stages` page-locked buffers, each filled as soon as the copy out of it is done.
    Scattered ones come together there, where only the thread waits for pages of a mapped file. Weights that are
    page-locked themselves are copied as they lie. So the thread that computes waits for no event and for nothing that
    follows a copy, such as a LoRA whose factors come from pageable memory. At a block's turn it waits until the copy
    was started, because only then is there something for the device to wait for.
    """

    def __init__(self, link: Link, stage_bytes: int, stages: int = STAGES, pinned: bool = True):
        self.link = link
        self.stages: list[Tensor] = []  # made when the first weights need one
        self._stage_bytes, self._pinned = stage_bytes, pinned
        self._leaving: list[Any] = [None] * stages  # the event of the last copy out of each stage
        self._turn = 0
        self._ended = False
        self._behind: Future[int] | None = None  # done when the worker has let go of the last copy
        self._thread: int | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tessera-stage")

    def copy(self, slot: Tensor, host: Tensor | ScatteredBuffer, then: Callable[[], None] | None) -> "Future[Any]":
        """Copy after everything computed so far, then call `then`; returns what `wait` takes."""
        assert not self._ended
        mode = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        if not self.stages and not host.is_pinned():
            self.stages = [host_bytes(self._stage_bytes, self._pinned) for _ in self._leaving]
        copied = self._worker.submit(self._send, slot, host, self.link.mark(), then, mode)
        # Submitted here and not in `settle`, which a finaliser may call wherever the collector runs: `submit` takes
        # a lock that all executors share, and one that waits for it inside another's `submit` waits for ever.
        self._behind = self._worker.submit(int)
        return copied

    def _send(
        self,
        slot: Tensor,
        host: Tensor | ScatteredBuffer,
        mark: Any,
        then: Callable[[], None] | None,
        mode: tuple[bool, bool],
    ) -> Any:
        self._thread = threading.get_ident()
        if self._ended:
            return None
        target = slot[: host.numel()]
        try:
            # Both modes belong to a thread; `then` has to run as it would have on the one that asked.
            with torch.inference_mode(mode[0]), torch.set_grad_enabled(mode[1]):
                if isinstance(host, Tensor) and host.is_pinned():
                    return self.link.send(target, host, mark, then)
                stage = self._turn % len(self.stages)
                self._turn += 1
                if self._leaving[stage] is not None:
                    self.link.finished(self._leaving[stage])
                source = self.stages[stage][: host.numel()]
                source.copy_(host) if isinstance(host, Tensor) else host.copy_to(source)
                self._leaving[stage] = self.link.send(target, source, mark, then)
                return self._leaving[stage]
        finally:
            if self._ended:  # `target` is the last to hold its slot
                self.link.settle()

    def wait(self, copied: "Future[Any] | None") -> None:
        """Let everything computed from here on start after that copy. Raises here what went wrong in the thread."""
        if copied is None:
            return
        try:
            event = copied.result()
        except BaseException:
            # The error takes along the frames that it passes, and the tensors in them: nothing but the handler may
            # hold it, neither this frame nor the thread.
            del copied
            self.settle()
            raise
        self.link.order(event)

    def settle(self) -> None:
        """Block until every copy that was asked for is done or has failed: slots may be freed then."""
        if threading.get_ident() == self._thread:
            # What holds the slots was collected on this thread, which can't wait for itself. Nothing is sent any more.
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
    """Choose the stream for flat weights; None where plain copies do as well.

    It is needed where not all are page-locked, or where something is `finished` on the device after a copy.
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

    Without a GPU, of copies within the host's memory.
    """
    size = TRIAL_BYTES.get(device.type, TRIAL_BYTES["cpu"])
    there = _there(size, device)
    host = host_bytes(len(there), device.type == "cuda").fill_(1)
    seconds = min(_copy_seconds(there, host) for _ in range(3))
    if not unlock(host):
        del host
        give_back()
    return len(there) / seconds


def _there(size: int, device: torch.device) -> Tensor:
    """Allocate `size` bytes on the device, or a part of them where it is that full."""
    while True:
        try:
            return torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            if size <= LEAST_TRIAL_BYTES:
                raise
        size //= 4


def _copy_seconds(there: Tensor, host: Tensor) -> float:
    if there.device.type == "cuda":
        torch.cuda.synchronize(there.device)
    started = time.perf_counter()
    there.copy_(host, non_blocking=True)
    if there.device.type == "cuda":
        torch.cuda.synchronize(there.device)
    return time.perf_counter() - started

"""The page-locked stage through which pageable weights are copied, with plain memory in its place."""

import contextlib
import gc
import threading
import weakref
from concurrent.futures.thread import _global_shutdown_lock
from typing import Any

import pytest
import torch
from tessera.memory.host import staging
from tessera.memory.host.page_locked import host_bytes
from tessera.memory.host.pinning import choose_pinning, unpinned_message
from tessera.memory.host.staging import LEAST_TRIAL_BYTES, StagedStream, link_bandwidth, staged_stream
from tessera.memory.swap.slot_ring import SlotRing
from torch.multiprocessing.reductions import StorageWeakRef

GB = 2**30


class Locked(torch.Tensor):
    """Stands for one in page-locked memory."""

    def is_pinned(self, *_: Any) -> bool:
        return True


class Event:
    def __init__(self) -> None:
        self.done = threading.Event()


class HeldLink:
    """A link whose copies are made when the test lets them, and read their source only then, as a device does."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor, Any, Any, Event]] = []
        self.arrived = threading.Semaphore(0)
        self.marks = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def send(self, slot, source, mark, after_copy) -> Event:
        self.copies.append((slot, source, mark, after_copy, Event()))
        self.arrived.release()
        return self.copies[-1][-1]

    def let_go(self, number: int) -> None:
        slot, source, _, callback, event = self.copies[number]
        slot.copy_(source)
        if callback is not None:
            callback()
        event.done.set()

    def finished(self, event: Event) -> None:
        assert event.done.wait(10)

    def order(self, event: Event) -> None:
        assert event.done.wait(10)

    def settle(self) -> None:
        for slot, source, _, _, event in self.copies:
            if not event.done.is_set():
                slot.copy_(source)
                event.done.set()


class PromptLink(HeldLink):
    """One whose copies are made at once."""

    def send(self, slot, source, mark, after_copy) -> Event:
        event = super().send(slot, source, mark, after_copy)
        self.let_go(-1)
        return event


def masters(count: int, size: int = 64) -> list[torch.Tensor]:
    return [torch.full((size - i,), i + 1, dtype=torch.uint8) for i in range(count)]


def test_a_stage_is_filled_again_only_after_the_copy_out_of_it() -> None:
    link = HeldLink()
    stream = StagedStream(link, 64, stages=2, pinned=False)
    hosts, slots = masters(4), [torch.zeros(64, dtype=torch.uint8) for _ in range(4)]
    copied = [stream.copy(slot, host, None) for slot, host in zip(slots, hosts, strict=True)]
    for _ in range(2):
        assert link.arrived.acquire(timeout=10)
    # Both stages are under way; the third copy may not be started before the first is done.
    assert not link.arrived.acquire(timeout=0.2) and len(link.copies) == 2
    assert [int(stage[0]) for stage in stream.stages] == [1, 2]
    for number in range(4):
        link.let_go(number)
        stream.wait(copied[number])
        if number < 2:
            assert link.arrived.acquire(timeout=10)
    assert [mark for _, _, mark, _, _ in link.copies] == [1, 2, 3, 4]
    for slot, host in zip(slots, hosts, strict=True):
        assert torch.equal(slot[: host.numel()], host) and not slot[host.numel() :].any()
    used = {source.data_ptr() for _, source, _, _, _ in link.copies}
    assert used == {stage.data_ptr() for stage in stream.stages} and len(used) == 2


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_a_ring_over_a_stage_brings_every_block_in_both_directions(prefetch: int) -> None:
    hosts = masters(6)
    ring, plain = (SlotRing(hosts, torch.device("cpu"), prefetch) for _ in range(2))
    ring.stream = StagedStream(PromptLink(), ring.slots.size, pinned=False)
    ring.take()
    plain.take()
    for _ in range(2):
        for j in range(6):
            ring.forward(j)
            plain.forward(j)
            assert torch.equal(ring.slots.tensor(j)[: hosts[j].numel()], hosts[j])
        for j in reversed(range(6)):
            ring.backward(j)
            plain.backward(j)
            assert torch.equal(ring.slots.tensor(j)[: hosts[j].numel()], hosts[j])
    assert ring.copies == plain.copies and ring.bytes_copied == plain.bytes_copied
    ring.stream.settle()


def test_errors_in_the_thread_are_raised_where_the_block_is_needed() -> None:
    stream = StagedStream(PromptLink(), 8, pinned=False)
    too_large = stream.copy(torch.zeros(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8), None)
    fits = stream.copy(slot := torch.zeros(8, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8), None)
    with pytest.raises(RuntimeError, match="size"):
        stream.wait(too_large)
    stream.wait(fits)
    assert slot.all()
    stream.settle()


def test_a_failed_copy_keeps_nothing_of_the_call_that_asked_for_it() -> None:
    """The error takes along the frames it passes, as an error in the thread that computes does: no longer than that."""
    fails, refs = [True], []

    def finish(j: int) -> None:
        if fails[0] and j == 2:
            refs.append(weakref.ref(patched := torch.zeros(8)))
            raise torch.OutOfMemoryError(f"no room for {patched.numel()}")

    def call() -> None:
        activations = torch.zeros(8)
        refs.append(weakref.ref(activations))
        for j in range(4):
            ring.forward(j)

    ring = SlotRing(masters(4), torch.device("cpu"), 1, finish)
    ring.stream = StagedStream(PromptLink(), ring.slots.size, pinned=False)
    ring.take()
    gc.disable()
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            call()
        assert len(refs) == 2 and [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()
    fails[0] = False
    call()
    assert torch.equal(ring.slots.tensor(3)[:61], ring.flat_weights[3])


def test_settling_waits_for_copies_that_failed_after_they_were_started_too() -> None:
    class Failing(HeldLink):
        def send(self, slot, source, mark, after_copy) -> Event:
            event = super().send(slot, source, mark, None)
            if after_copy is not None:
                after_copy()
            return event

    def fail() -> None:
        raise torch.OutOfMemoryError

    stream = StagedStream(link := Failing(), 8, pinned=False)
    slots = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    for slot, callback in zip(slots, (fail, None), strict=True):
        stream.copy(slot, torch.ones(8, dtype=torch.uint8), callback)
    stream.settle()
    assert len(link.copies) == 2 and all(slot.all() for slot in slots)


def test_holder_of_the_slots_may_be_collected_on_the_thread_that_fills_them() -> None:
    class Holder:
        def __del__(self) -> None:
            stream.release()
            let_go.set()

    holders, let_go = [Holder()], threading.Event()
    stream = StagedStream(PromptLink(), 8, pinned=False)
    slots = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    copied = [stream.copy(slots[0], torch.ones(8, dtype=torch.uint8), holders.clear)]
    assert let_go.wait(10)
    assert copied[0].result(10) is not None and slots[0].all()


def test_a_finaliser_settles_while_another_executor_takes_work() -> None:
    """The collector may run inside `submit`, which holds a lock that all executors share."""
    stream = StagedStream(PromptLink(), 8, pinned=False)
    stream.wait(stream.copy(torch.zeros(8, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8), None))
    with _global_shutdown_lock:
        settled = threading.Thread(target=stream.settle, daemon=True)
        settled.start()
        settled.join(10)
        assert not settled.is_alive()


def test_stages_are_made_for_pageable_masters_alone_and_given_back() -> None:
    stream = StagedStream(PromptLink(), 8, pinned=False)
    slot = torch.zeros(8, dtype=torch.uint8)
    stream.wait(stream.copy(slot, torch.ones(8, dtype=torch.uint8).as_subclass(Locked), None))
    assert slot.all() and stream.stages == []
    with torch.inference_mode():  # a node's run makes them, and a preview or a server's thread may use them outside
        stream.wait(stream.copy(slot, torch.full((8,), 2, dtype=torch.uint8), None))
    for number in (3, 4):
        stream.wait(stream.copy(slot, torch.full((8,), number, dtype=torch.uint8), None))
        assert (slot == number).all() and len(stream.stages) == 2
    stream.release()
    assert stream.stages == []
    stream.wait(stream.copy(slot, torch.full((8,), 5, dtype=torch.uint8), None))
    assert (slot == 5).all()


def test_memory_that_torch_has_locked_for_stages_and_for_a_measurement_goes_back_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storages, calls = [], []

    def lock(size: int, pinned: bool) -> torch.Tensor:
        buffer = torch.zeros(size, dtype=torch.uint8)
        storages.append(StorageWeakRef(buffer.untyped_storage()))
        return buffer

    monkeypatch.setattr(staging, "host_bytes", lock)
    monkeypatch.setattr(staging, "unlock", lambda buffer: False)
    monkeypatch.setattr(staging, "give_back", lambda: calls.append([storage.expired() for storage in storages]))
    stream = StagedStream(PromptLink(), 8)
    stream.release()  # nothing to give back
    stream.wait(stream.copy(torch.zeros(8, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8), None))
    stream.link.copies.clear()
    stream.release()
    assert calls == [[True, True]]
    link_bandwidth.__wrapped__(torch.device("cpu"))
    assert calls[1:] == [[True, True, True]]


def test_a_thread_copies_what_is_not_locked_and_what_has_to_be_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.memory.host.staging.CudaLink", lambda device: PromptLink())
    cuda, plain = torch.device("cuda"), masters(3)
    locked = [master.as_subclass(Locked) for master in plain]
    assert staged_stream(locked, cuda) is None and staged_stream(locked, torch.device("cpu"), True) is None
    for hosts, finished in ((locked, True), (plain, False), ([*locked, plain[0]], False)):
        assert isinstance(staged_stream(hosts, cuda, finished), StagedStream)
    # Masters of other memory may come later: a preview's lie where training has them.
    ring = SlotRing(plain, torch.device("cpu"), 1)
    assert ring.accepts(plain) and ring.accepts(locked)
    ring.stream.stream = object()
    assert ring.accepts(locked) and not ring.accepts([*locked, plain[0]])


@pytest.mark.parametrize("inference", [True, False])
def test_work_after_a_copy_runs_in_the_modes_of_the_thread_that_asked(inference: bool) -> None:
    modes = []
    stream = StagedStream(PromptLink(), 8, pinned=False)
    with torch.inference_mode(inference), torch.set_grad_enabled(not inference):
        copied = stream.copy(
            torch.zeros(8, dtype=torch.uint8),
            torch.ones(8, dtype=torch.uint8),
            lambda: modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled())),
        )
        stream.wait(copied)
    assert modes == [(inference, not inference)]


def test_the_link_is_measured_with_less_on_a_card_that_is_full(monkeypatch) -> None:
    sizes = []

    def empty(size, **_):
        sizes.append(size)
        if size > 4 * LEAST_TRIAL_BYTES:
            raise torch.OutOfMemoryError
        return torch.zeros(size)

    monkeypatch.setattr(staging.torch, "empty", empty)
    buffer = staging._trial_buffer(16 * LEAST_TRIAL_BYTES, torch.device("cpu"))
    assert len(buffer) == 4 * LEAST_TRIAL_BYTES and sizes == [16 * LEAST_TRIAL_BYTES, 4 * LEAST_TRIAL_BYTES]


def test_host_without_a_gpu_locks_nothing_and_stages_nothing() -> None:
    assert not choose_pinning("on", "cpu", GB, 99 * GB, False).pinned
    assert staged_stream(masters(2), torch.device("cpu")) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="page-locked memory can be had here")
def test_a_run_goes_on_with_plain_memory_that_cannot_be_locked_and_says_so(caplog) -> None:
    memory = host_bytes(64, pinned=True)
    assert memory.numel() == 64 and not memory.is_pinned()
    assert "could not be page-locked" in caplog.text
    # Whoever keeps the record keeps no frame by it, and no tensor of a step that stands in one.
    assert not any(isinstance(arg, BaseException) for record in caplog.records for arg in record.args)
    assert unpinned_message(0, 3) is None
    message = unpinned_message(3, 3)
    assert message is not None and message.startswith("3 of 3 swapped blocks could not be page-locked")


def test_the_link_is_measured_in_bytes_per_second() -> None:
    assert link_bandwidth(torch.device("cpu")) > 1e7

"""Page-locking beside the work, with a stand-in for CUDA's registry that locks when it is let."""

import gc
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import comfy.model_management as mm
import pytest
import tiny
import torch
from tessera.memory.host import page_locked, pinning
from tessera.memory.host.locking import Locking
from tessera.memory.host.page_locked import host_bytes, unlock
from tessera.memory.host.pinning import Pinning
from tessera.memory.host.staging import HostLink, StagedStream
from tessera.memory.swap.slot_ring import CopyStream, SlotRing
from tessera.train.config.settings import MemoryOptions
from tiny.memory import swapping
from tiny.memory.streams import streams
from tiny.memory.swapping import assert_same_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch's own allocator locks at once")
CPU, SIZE = torch.device("cpu"), 4096


class Registry:
    """Stand-in for CUDA that locks once `gate` is open, and answers with an error from the number `refuses` on."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.locked: list[int] = []
        self.threads: set[int] = set()
        self.refuses = 99

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert self.gate.wait(60)
        self.threads.add(threading.get_ident())
        if len(self.locked) >= self.refuses:
            return 2
        self.locked.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.locked.remove(address)
        return 0


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = Registry()
    monkeypatch.setattr(page_locked, "_cudart", lambda: fake)
    monkeypatch.setattr(page_locked, "discard_cuda_error", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(mm, "TOTAL_PINNED_MEMORY", 0)
    yield fake
    fake.gate.set()
    gc.collect()


def buffers(count: int = 3) -> list[torch.Tensor]:
    return [host_bytes(SIZE, True, later=True).fill_(i + 1) for i in range(count)]


def ring_of(flat_weights: list[torch.Tensor]) -> SlotRing:
    """Through a stage, as on a GPU what is not locked."""
    ring = SlotRing(flat_weights, CPU, 1, stream=StagedStream(HostLink(), SIZE, pinned=False))  # type: ignore[arg-type]
    ring.take()
    ring.lock_meanwhile()
    return ring


def passes(ring: SlotRing) -> list[int]:
    """What the slots hold, block after block."""
    values = []
    for j in range(len(ring.flat_weights)):
        ring.forward(j)
        values.append(int(ring.slots.tensor(j)[: ring.flat_weights[j].numel()].float().mean()))
    return values


def test_filled_buffers_are_locked_later_on_another_thread_and_counted_on_this(registry: Registry) -> None:
    pages = buffers()
    locking = Locking(pages, CPU)
    assert registry.locked == [] and not locking.is_done()
    registry.gate.set()
    locking.wait()
    assert registry.locked == [buffer.data_ptr() for buffer in pages]
    assert registry.threads.isdisjoint({threading.get_ident()}) and mm.TOTAL_PINNED_MEMORY == 0
    locking.end()
    assert mm.TOTAL_PINNED_MEMORY == 3 * SIZE and locking.failed == 0
    assert [int(buffer[7]) for buffer in pages] == [1, 2, 3]
    assert all(unlock(buffer) for buffer in pages) and (registry.locked, mm.TOTAL_PINNED_MEMORY) == ([], 0)


def test_blocks_go_through_a_stage_until_all_are_locked_and_as_they_lie_from_then_on(registry: Registry) -> None:
    ring = ring_of(buffers())
    assert passes(ring) == [1, 2, 3] and isinstance(ring.stream, StagedStream) and ring.stream.stages
    registry.gate.set()
    assert ring.locking is not None
    ring.locking.wait()
    assert passes(ring) == [1, 2, 3] and isinstance(ring.stream, CopyStream) and ring.locking is None
    assert passes(ring) == [1, 2, 3] and mm.TOTAL_PINNED_MEMORY == 3 * SIZE


def test_the_stage_stays_if_cuda_refuses_one_buffer_and_the_rest_is_not_tried(registry: Registry) -> None:
    registry.refuses = 1
    registry.gate.set()
    ring = ring_of(buffers())
    assert ring.locking is not None
    ring.locking.wait()
    assert passes(ring) == [1, 2, 3] and isinstance(ring.stream, StagedStream)
    assert ring.refused == 2 and len(registry.locked) == 1 and mm.TOTAL_PINNED_MEMORY == SIZE


def test_a_buffer_that_nobody_wants_any_more_is_not_kept_for_its_lock(registry: Registry) -> None:
    pages = buffers()
    freed = weakref.ref(pages[2])
    locking = Locking(pages, CPU)
    del pages
    gc.collect()
    assert freed() is None
    registry.gate.set()
    locking.end()
    assert registry.locked == []


def test_a_run_whose_weights_are_locked_beside_it_gives_the_same_bits(registry, tmp_path, monkeypatch) -> None:
    file = tiny.write_flux(tmp_path / "flux.safetensors", depth=1, depth_single=3)
    data = swapping.three_pictures()
    plain = swapping.trained(tiny.load_flux(file), data, tmp_path / "plain", steps=3)
    monkeypatch.setattr(pinning, "choose_pinning", lambda *_: Pinning(True, ""))
    kinds: list[str] = []
    forward = SlotRing.forward

    def noted(self: SlotRing, j: int) -> None:
        if len(kinds) == 10 and self.locking is not None:
            registry.gate.set()
            self.locking.wait()
        forward(self, j)
        kinds.append(type(self.stream).__name__)

    monkeypatch.setattr(SlotRing, "forward", noted)
    with streams(monkeypatch, staged=True):
        swapped = swapping.trained(tiny.load_flux(file), data, tmp_path / "swapped", steps=3, blocks_to_swap=4)
    assert set(kinds[:10]) == {"StagedStream"} and set(kinds[10:]) == {"CopyStream"} and len(registry.locked) == 4
    assert_same_run(swapped, plain)
    swapped.close()
    assert registry.locked == [] and mm.TOTAL_PINNED_MEMORY == 0


def test_a_run_that_ends_before_leaves_nothing_locked(registry, tmp_path, monkeypatch) -> None:
    file = tiny.write_flux(tmp_path / "flux.safetensors", depth=1, depth_single=1)
    monkeypatch.setattr(pinning, "choose_pinning", lambda *_: Pinning(True, ""))
    registry.gate.set()
    data = swapping.three_pictures()
    trainer = tiny.make_trainer(
        tiny.load_flux(file), data, Path(tmp_path), memory=MemoryOptions(blocks_to_swap=2, checkpointing="none")
    )
    trainer.close()
    assert registry.locked == [] and mm.TOTAL_PINNED_MEMORY == 0

"""Page-locked memory, with a stand-in for CUDA's registry: how much is locked, and until when."""

import gc
import logging
import mmap
import sys
from typing import Any

import comfy.model_management as mm
import pytest
import torch
from tessera.memory.host import page_locked as module
from tessera.memory.host.flat_buffer import Layout, empty_bytes
from tessera.memory.host.page_locked import give_back, host_bytes, page_locked, unlock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch's own allocator is taken")
SIZE = 3 * 2**20 + 1  # torch's own allocator would lock 4 MiB


class Registry:
    """Stand-in for CUDA that notes what it is told; `refuses` is the error that it answers."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.ended: list[int] = []
        self.refuses = 0
        self.waits = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if not self.refuses:
            assert address not in self.locked and flags == 1
            self.locked[address] = size
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert self.waits > len(self.ended)
        del self.locked[address]
        self.ended.append(address)
        return 0

    def synchronize(self, device: int) -> None:
        self.waits += 1


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = Registry()
    monkeypatch.setattr(module, "_cudart", lambda: fake)
    monkeypatch.setattr(module, "discard_cuda_error", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    yield fake
    gc.collect()  # before the stand-in goes


def test_comfyui_counts_what_is_locked_and_makes_room_for_it_first(registry: Registry, monkeypatch: Any) -> None:
    requests: list[tuple[int, int]] = []
    monkeypatch.setattr(mm, "TOTAL_PINNED_MEMORY", 5)
    monkeypatch.setattr(mm, "ensure_pin_registerable", lambda size: requests.append((size, mm.TOTAL_PINNED_MEMORY)))
    first, other = page_locked(SIZE), page_locked(SIZE)
    assert requests == [(SIZE, 5), (SIZE, 5 + SIZE)] and mm.TOTAL_PINNED_MEMORY == 5 + 2 * SIZE
    assert unlock(first) and mm.TOTAL_PINNED_MEMORY == 5 + SIZE
    del first, other
    gc.collect()
    assert mm.TOTAL_PINNED_MEMORY == 5
    registry.refuses = 1
    with pytest.raises(RuntimeError, match="refuses"):
        page_locked(SIZE)
    assert mm.TOTAL_PINNED_MEMORY == 5


def test_a_comfyui_that_counts_nothing_is_told_nothing(registry: Registry, monkeypatch: Any) -> None:
    for name in ("TOTAL_PINNED_MEMORY", "ensure_pin_registerable"):
        monkeypatch.delattr(mm, name)
    assert unlock(page_locked(SIZE)) and not hasattr(mm, "TOTAL_PINNED_MEMORY")


def test_locked_memory_is_as_much_as_asked_for_in_pages_of_its_own(registry: Registry) -> None:
    buffers = [page_locked(SIZE) for _ in range(3)]
    assert list(registry.locked.values()) == [SIZE] * 3
    assert all(buffer.data_ptr() % mmap.PAGESIZE == 0 and buffer.numel() == SIZE for buffer in buffers)
    for i, buffer in enumerate(buffers):
        buffer.fill_(i)
    assert [int(buffer.float().mean()) for buffer in buffers] == [0, 1, 2]


def test_a_buffer_is_unlocked_once_and_only_with_the_last_tensor_over_it(registry: Registry) -> None:
    flat = empty_bytes(SIZE, torch.device("cpu"), pinned=True)
    layout = Layout.from_tensors([("a", torch.zeros(100)), ("b", torch.zeros(7, 5))])
    a, b = (field.tensor_in(flat) for field in layout.fields)
    b.fill_(2.0)
    del flat, a
    gc.collect()
    assert registry.ended == [] and float(b.sum()) == 70.0
    parameter = torch.nn.Parameter(b, requires_grad=False)
    del b
    gc.collect()
    assert registry.ended == []
    del parameter
    gc.collect()
    assert len(registry.ended) == 1 and registry.locked == {}


def test_a_buffer_can_be_unlocked_before_it_goes(registry: Registry) -> None:
    flat = empty_bytes(SIZE, torch.device("cpu"), pinned=True)
    assert unlock(torch.zeros(3))  # ordinary memory
    assert len(registry.locked) == 1
    assert unlock(flat[100:200])
    assert registry.locked == {} and len(registry.ended) == 1
    flat.fill_(7)
    assert int(flat[-1]) == 7
    unlock(flat)
    del flat
    gc.collect()
    assert len(registry.ended) == 1


def test_memory_that_torch_has_locked_itself_is_told_apart(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    class OfTorch(torch.Tensor):
        def is_pinned(self, *_: Any) -> bool:
            return True

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(torch, "empty", lambda size, pin_memory, **kw: torch.zeros(size, **kw).as_subclass(OfTorch))
    buffer = page_locked(SIZE)
    assert not unlock(buffer) and registry.ended == []
    calls: list[bool] = []
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: calls.append(True))
    give_back()
    assert calls == [True]


def test_plain_memory_is_taken_if_cuda_refuses_and_nothing_is_unlocked(registry: Registry, caplog: Any) -> None:
    registry.refuses = 2
    with caplog.at_level(logging.WARNING):
        buffer = host_bytes(SIZE, pinned=True)
    assert buffer.numel() == SIZE and "could not be page-locked" in caplog.text
    del buffer
    gc.collect()
    assert registry.ended == []


def test_memory_without_a_device_is_plain(caplog: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with caplog.at_level(logging.WARNING):
        assert host_bytes(SIZE, pinned=True).numel() == SIZE
    assert "there is no CUDA device" in caplog.text

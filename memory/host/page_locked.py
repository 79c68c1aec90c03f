"""Page-locked host memory of the size that is asked for, and how it is let go of.

torch's allocator of it rounds up to a power of two and keeps what is freed. The blocks of FLUX.1 in bf16 take 648 and
270 MiB, for which it would lock 1024 and 512: 38 GiB for the model in place of 22. So each buffer is a mapping of its
own that is registered with CUDA, as ComfyUI registers weights, and goes back to the system with the last tensor over
it. On Windows, where no mapping of this kind has been registered yet, it is torch's, and what is in it has to leave it
before it is page-locked no longer.
"""

import contextlib
import logging
import mmap
import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...common.core import count_locked, discard_cuda_error, make_room_to_lock

log = logging.getLogger(__name__)

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices


def page_locked(size: int) -> Tensor:
    """Allocate `size` page-locked bytes on the host. Raises RuntimeError or OSError where they can't be had."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device")
    if sys.platform != "linux":
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    buffer = lockable(size)
    make_room_to_lock(size)
    error = lock(buffer)
    if error != 0:
        raise RuntimeError(f"CUDA refuses to register it ({error})")
    count_newly_locked([buffer])
    return buffer


def lockable(size: int) -> Tensor:
    """Allocate `size` bytes on the host that `lock` can page-lock later, with what is in them by then.

    In large pages where the system has them: there are five hundred times fewer to fill and to lock.
    """
    mapping = _Registered(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(mapping, dtype=torch.uint8)
    _registered[buffer.data_ptr()] = mapping
    return buffer


def lock(buffer: Tensor) -> int:
    """Page-lock the memory of a tensor over lockable bytes, on the current device; returns CUDA's error, or 0.

    It may be called on a thread of its own. What it locks is counted by `count_newly_locked`.
    """
    mapping = _registered.get(buffer.untyped_storage().data_ptr())
    if mapping is None or mapping.address is not None:
        return 0
    address = buffer.untyped_storage().data_ptr()
    error = int(_cudart().cudaHostRegister(address, len(mapping), PORTABLE))
    if error != 0:
        # CUDA reports it once more, at the next call of anybody.
        discard_cuda_error()
        return error
    mapping.address, mapping.device = address, torch.cuda.current_device()
    return 0


def count_newly_locked(buffers: Iterable[Tensor]) -> None:
    """Count what `lock` has locked with ComfyUI's own, which only the thread that runs models may."""
    for buffer in buffers:
        mapping = _registered.get(buffer.untyped_storage().data_ptr())
        if mapping is not None and mapping.address is not None and not mapping.counted:
            mapping.counted = True
            count_locked(len(mapping))


def host_bytes(size: int, pinned: bool, later: bool = False) -> Tensor:
    """Allocate `size` bytes on the host, page-locked where that is asked for and can be had.

    They may be written in inference mode and outside of it, wherever they are asked for.
    later: they are to be locked by `lock`, where the system can do that.
    """
    with torch.inference_mode(False):
        if pinned:
            try:
                return lockable(size) if later and sys.platform == "linux" else page_locked(size)
            except (RuntimeError, OSError) as error:
                log.warning("%d bytes of RAM could not be page-locked; pageable memory is used: %s", size, str(error))
        return torch.empty(size, dtype=torch.uint8)


def unlock(buffer: Tensor) -> bool:
    """Unlock the memory of a tensor over such a buffer; the memory stays.

    Returns False where it is torch's own, which is page-locked until it is freed and `give_back` is called.
    """
    with contextlib.suppress(RuntimeError):  # where CUDA itself has broken down, what ended the run is told
        if (mapping := _registered.get(buffer.untyped_storage().data_ptr())) is not None:
            mapping.unlock()
        else:
            return not buffer.is_pinned()
    return True


def give_back() -> None:
    """Let torch's own allocator of page-locked memory give back what was freed, which it keeps for later."""
    with contextlib.suppress(AttributeError, RuntimeError):  # a version of torch that has no such call, or as above
        torch._C._host_emptyCache()


def _cudart() -> Any:
    return torch.cuda.cudart()


class _Registered(mmap.mmap):
    """Anonymous memory that is unregistered, if it was registered, before it goes back to the system.

    The tensor over it holds it.
    """

    address: int | None = None  # once it is locked
    device = 0
    counted = False

    def unlock(self) -> None:
        address, self.address = self.address, None
        if address is not None:
            torch.cuda.synchronize(self.device)  # nothing may be copying still
            _cudart().cudaHostUnregister(address)
            if self.counted:
                count_locked(-len(self))
            self.counted = False

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be on its way out
            self.unlock()


_registered: "WeakValueDictionary[int, _Registered]" = WeakValueDictionary()

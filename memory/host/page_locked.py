"""Page-locked host memory of exactly the requested size, and its release.

torch's pinned allocator rounds up to a power of two and caches freed memory. The blocks of FLUX.1 in bf16 take 648 and
270 MiB, for which it would lock 1024 and 512: 38 GiB for the model instead of 22. So each buffer is a separate mapping
that is registered with CUDA, as ComfyUI registers weights, and returns to the system with the last tensor over it. On
Windows, where registering such a mapping is untested, torch's allocator is used, and tensors have to be copied out of a
buffer before it can be unlocked.
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
    """Allocate page-locked bytes on the host, (size,) uint8. Raises RuntimeError or OSError on failure."""
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
    """Allocate bytes on the host, (size,) uint8, that `lock` can page-lock later, contents included.

    Uses huge pages if the system has them: five hundred times fewer pages to fault in and to lock.
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

    It may be called on a background thread. `count_newly_locked` counts the locked bytes.
    """
    mapping = _registered.get(buffer.untyped_storage().data_ptr())
    if mapping is None or mapping.address is not None:
        return 0
    address = buffer.untyped_storage().data_ptr()
    error = int(_cudart().cudaHostRegister(address, len(mapping), PORTABLE))
    if error != 0:
        # CUDA would report the error again at the next call from anywhere.
        discard_cuda_error()
        return error
    mapping.note_lock(address, torch.cuda.current_device())
    return 0


def count_newly_locked(buffers: Iterable[Tensor]) -> None:
    """Add bytes locked by `lock` to ComfyUI's count, which only the thread that runs models may change."""
    for buffer in buffers:
        mapping = _registered.get(buffer.untyped_storage().data_ptr())
        if mapping is not None and mapping.address is not None and not mapping.counted:
            mapping.count()


def host_bytes(size: int, pinned: bool, later: bool = False) -> Tensor:
    """Allocate bytes on the host, (size,) uint8, page-locked if requested and possible.

    They may be written in inference mode and outside it, whichever the caller is in.
    later: `lock` is to lock them, if the system supports it.
    """
    with torch.inference_mode(False):
        if pinned:
            try:
                return lockable(size) if later and sys.platform == "linux" else page_locked(size)
            except (RuntimeError, OSError) as error:
                log.warning("%d bytes of RAM could not be page-locked; pageable memory is used: %s", size, str(error))
        return torch.empty(size, dtype=torch.uint8)


def unlock(buffer: Tensor) -> bool:
    """Unlock the memory of a tensor over such a buffer; the memory stays allocated.

    Returns False for torch's own, which is page-locked until it is freed and `give_back` is called.
    """
    with contextlib.suppress(RuntimeError):  # if CUDA has failed, the run's own error is the one to report
        if (mapping := _registered.get(buffer.untyped_storage().data_ptr())) is not None:
            mapping.unlock()
        else:
            return not buffer.is_pinned()
    return True


def give_back() -> None:
    """Return the freed memory cached by torch's pinned allocator to the system."""
    with contextlib.suppress(AttributeError, RuntimeError):  # a torch without this call, or as above
        torch._C._host_emptyCache()


def _cudart() -> Any:
    return torch.cuda.cudart()


class _Registered(mmap.mmap):
    """Anonymous mapping that is unregistered from CUDA, if it was registered, before it is unmapped.

    The tensor over it keeps it alive.
    """

    address: int | None = None  # once it is locked
    device = 0
    counted = False

    def note_lock(self, address: int, device: int) -> None:
        """Note that CUDA has locked it at this address, on the current device."""
        self.address, self.device = address, device

    def count(self) -> None:
        """Add its bytes to ComfyUI's count."""
        self.counted = True
        count_locked(len(self))

    def unlock(self) -> None:
        address, self.address = self.address, None
        if address is not None:
            torch.cuda.synchronize(self.device)  # no copy may still be in flight
            _cudart().cudaHostUnregister(address)
            if self.counted:
                count_locked(-len(self))
            self.counted = False

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be shutting down
            self.unlock()


_registered: "WeakValueDictionary[int, _Registered]" = WeakValueDictionary()

"""Page-locking in the background: lock buffers one after another while training already runs.

Locking FLUX's 24 GB took 12 s on a machine with an H100, longer than its first steps. Buffers not locked yet are copied
through a page-locked stage meanwhile.
"""

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ...common.core import make_room_to_lock
from .page_locked import count_newly_locked, lock


class Locking:
    """Locks buffers made by `page_locked.lockable` in order, on a background thread, holding only weak references."""

    def __init__(self, buffers: Sequence[Tensor], device: torch.device):
        make_room_to_lock(sum(buffer.numel() for buffer in buffers))
        self._buffers = [weakref.ref(buffer) for buffer in buffers]
        self._device, self._ended = device, threading.Event()
        self.failed = 0
        self._thread = threading.Thread(target=self._lock_all, name="tessera-lock", daemon=True)
        self._thread.start()

    def _lock_all(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        for number, reference in enumerate(self._buffers):
            buffer = reference()
            if self._ended.is_set() or buffer is None:
                continue
            if lock(buffer) != 0:
                self.failed = len(self._buffers) - number  # the rest would be refused as well
                return

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Block until all buffers are locked or one is refused."""
        self._thread.join()

    def end(self) -> None:
        """Stop after the current buffer and count the locked bytes with ComfyUI. Call it on the training thread."""
        self._ended.set()
        self._thread.join()
        count_newly_locked(buffer for reference in self._buffers if (buffer := reference()) is not None)

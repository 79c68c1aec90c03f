"""Detect NVIDIA's system memory fallback: once the card is full, the Windows driver uses RAM, many times slower."""

import torch

from .pinning import is_windows

TOLERANCE = 256 * 2**20  # bytes that other programs may have freed meanwhile


class SysmemMonitor:
    """Compares torch's reserved memory with the card's initial capacity, on systems whose driver may fall back."""

    def __init__(self, device: torch.device):
        self.device = device
        self.watches = device.type == "cuda" and is_windows()
        self.capacity = self._capacity() if self.watches else 0

    def _capacity(self) -> int:
        """Return the bytes that torch has reserved plus those still free."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return torch.cuda.memory_reserved(self.device) + free

    def message(self) -> str | None:
        """Return one sentence, once, if device memory has spilled into RAM."""
        if not self.watches:
            return None
        spilled = torch.cuda.memory_reserved(self.device) - self.capacity
        if spilled <= TOLERANCE:
            return None
        free, _ = torch.cuda.mem_get_info(self.device)
        if free > TOLERANCE:
            # Memory outside torch's allocator, such as a text encoder under dynamic VRAM, has since been freed.
            self.capacity = self._capacity()
            return None
        self.watches = False
        return (
            f"About {spilled / 2**30:.1f} GB are in shared GPU memory, which is RAM and many times slower; set "
            "blocks_to_swap to -1, or higher, or close other programs on this GPU."
        )

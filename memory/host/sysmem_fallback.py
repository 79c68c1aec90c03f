"""NVIDIA's system memory fallback: on Windows the driver lends RAM where the card is full, many times slower."""

import torch

from .pinning import is_windows

TOLERANCE = 256 * 2**20  # what other programs may have given back meanwhile


class SysmemMonitor:
    """Compares torch's reserved memory with the card's capacity at the start, where the driver may fall back at all."""

    def __init__(self, device: torch.device):
        self.device = device
        self.watches = device.type == "cuda" and is_windows()
        self.capacity = self._capacity() if self.watches else 0

    def _capacity(self) -> int:
        """Return bytes that torch has and may still get, as long as some is free."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return torch.cuda.memory_reserved(self.device) + free

    def message(self) -> str | None:
        """Return one sentence, once, where memory lies in RAM."""
        if not self.watches:
            return None
        spilled = torch.cuda.memory_reserved(self.device) - self.capacity
        if spilled <= TOLERANCE:
            return None
        free, _ = torch.cuda.mem_get_info(self.device)
        if free > TOLERANCE:
            # What was not torch's own, such as a text encoder under dynamic VRAM, has left the device since.
            self.capacity = self._capacity()
            return None
        self.watches = False
        return (
            f"About {spilled / 2**30:.1f} GB are in shared GPU memory, which is RAM and many times slower; set "
            "blocks_to_swap to -1, or higher, or close other programs on this GPU."
        )

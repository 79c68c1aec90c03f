"""Memory of the device that does not lie on it: Windows' driver lends RAM where the card is full, many times slower."""

import torch

from .pinning import is_windows

TOLERANCE = 256 * 2**20  # what other programs may have given back meanwhile


class SysmemMonitor:
    """Compares what torch holds with what it held and what was free at the start, where memory may spill at all."""

    def __init__(self, device: torch.device):
        self.device = device
        self.watches = device.type == "cuda" and is_windows()
        self.capacity = self._capacity() if self.watches else 0

    def _capacity(self) -> int:
        """Bytes: what torch has and may still get, as long as some is free."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return torch.cuda.memory_reserved(self.device) + free

    def message(self) -> str | None:
        """One sentence, once, where memory has spilled."""
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
            f"About {spilled / 2**30:.1f} GB lie in shared GPU memory, which is RAM and many times slower; set "
            "blocks_to_swap to -1, or higher, or close other programs on this GPU."
        )

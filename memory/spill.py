"""Memory of the device that does not lie on it: Windows' driver lends RAM where the card is full, many times slower."""

import torch

from .pinning import is_windows

TOLERANCE = 256 * 2**20  # what other programs may have given back meanwhile


def spilled_bytes(reserved: int, reserved_before: int, free_before: int) -> int:
    """How much of what torch has reserved since `before` cannot be on the device: more than the driver had free then.

    Other programs may have freed some since, so a small excess counts as none.
    """
    excess = reserved - reserved_before - free_before
    return excess if excess > TOLERANCE else 0


class SpillWatch:
    """Compares what a run takes with what the driver had free at its start, where memory may spill at all."""

    def __init__(self, device: torch.device):
        self.device = device
        self.watches = device.type == "cuda" and is_windows()
        if self.watches:
            self.free, _ = torch.cuda.mem_get_info(device)
            self.reserved = torch.cuda.memory_reserved(device)

    def told(self) -> str | None:
        """One sentence, once, where memory has spilled."""
        if not self.watches:
            return None
        spilled = spilled_bytes(torch.cuda.memory_reserved(self.device), self.reserved, self.free)
        if not spilled:
            return None
        self.watches = False
        return (
            f"About {spilled / 2**30:.1f} GB lie in shared GPU memory, which is RAM and many times slower; set "
            "blocks_to_swap to -1, or higher, or close other programs on this GPU."
        )

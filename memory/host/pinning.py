"""Page-locked host memory: where the masters of swapped blocks take it, and what stands in where they may not.

Copies from page-locked memory run beside the computation. Locking all masters is the fastest, and is not always safe:
Windows gives a program about half of the RAM as memory that a GPU may read, and what goes beyond starves the rest of
the system. There a small page-locked stage is filled by a thread of its own, block after block.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .flat_buffer import ScatteredBuffer

PIN_MEMORY = ("auto", "on", "off")
KEPT_FREE = 4 * 2**30  # bytes of RAM that 'auto' leaves to everything else


def is_windows() -> bool:
    """Windows, or Linux inside it, whose GPU driver is the same."""
    return platform.system() == "Windows" or "microsoft" in platform.uname().release.lower()


@dataclass(frozen=True)
class Pinning:
    """masters: whether the masters are page-locked; reason: one sentence for the user."""

    masters: bool
    reason: str


def choose_pinning(mode: str, device: str, coming: int, available: int, windows: bool) -> Pinning:
    """mode: 'auto', 'on' or 'off'; device: its type; coming: bytes of the masters that do not lie in RAM yet, but in a
    mapped file or on the device; available: bytes of free RAM, beside the masters that do."""
    if device != "cuda":
        return Pinning(False, "pin_memory has no effect without a CUDA device.")
    if mode == "on":
        return Pinning(True, "The swapped blocks are page-locked, as pin_memory asks.")
    if mode == "off":
        return Pinning(False, "The swapped blocks go through a page-locked stage, as pin_memory asks.")
    if windows:
        return Pinning(
            False, "The swapped blocks go through a page-locked stage: Windows bounds the memory that may be locked."
        )
    if available < coming + KEPT_FREE:
        return Pinning(
            False,
            f"The swapped blocks go through a page-locked stage: locking them all would leave less than "
            f"{KEPT_FREE // 2**30} GB of RAM to everything else.",
        )
    return Pinning(True, "The swapped blocks are page-locked.")


def not_pinned(masters: Sequence[Tensor | ScatteredBuffer]) -> str | None:
    """What is to be said where page-locked masters were asked for: None if they are."""
    plain = sum(1 for master in masters if not master.is_pinned())
    if not plain:
        return None
    return (
        f"{plain} of {len(masters)} swapped blocks could not be page-locked and go through a page-locked stage; free "
        "some RAM, or set pin_memory to 'off'."
    )

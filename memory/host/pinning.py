"""Policy of page-locked host memory: choose the placement of the flat weights of swapped blocks.

Copies from page-locked memory overlap with computation. Locking all flat weights is the fastest, but not always safe:
Windows limits the memory that a GPU may read to about half of the RAM per program, and going beyond starves the rest of
the system. There the weights are copied through a small page-locked stage (see `staging`), and if RAM is short they
stay in the mapped file they were loaded from.
"""

import platform
from dataclasses import dataclass

from ...common.text import quantity
from .file_bandwidth import worth_streaming

PIN_MEMORY = ("auto", "on", "off")
RESERVED_RAM = 4 * 2**30  # bytes that 'auto' leaves for everything else
GIB = 2**30


def is_windows() -> bool:
    """Return True on Windows and under WSL, which uses the same GPU driver."""
    return platform.system() == "Windows" or "microsoft" in platform.uname().release.lower()


@dataclass(frozen=True)
class HostWeights:
    """Bytes of the weights of swapped blocks by their current location.

    total: of all of them.
    in_file: in a mapped file.
    on_device: on the device, to be copied to the host.
    """

    total: int
    in_file: int
    on_device: int = 0


@dataclass(frozen=True)
class HostPlacement:
    """Placement of swapped weights on the host while they stream.

    pinned: they are page-locked.
    from_file: those in a mapped file stay there.
    notes: sentences for the user, the most important first.
    """

    pinned: bool
    from_file: bool
    notes: tuple[str, ...]


def place_on_host(mode: str, device: str, weights: HostWeights, available: int) -> HostPlacement:
    """Choose the host placement of swapped weights.

    mode: pin_memory. device: type of the device that they stream to. available: bytes of free RAM, not counting the
    weights that are already in RAM.
    """
    from_file, note = stream_from_file(mode, weights.in_file, weights.total, available)
    notes = [] if note is None else [note]
    if from_file:
        return HostPlacement(False, True, tuple(notes))
    pinning = choose_pinning(mode, device, weights.in_file + weights.on_device, available, is_windows())
    if not pinning.pinned and device == "cuda":  # without a GPU nothing is ever locked
        notes.append(pinning.reason)
    return HostPlacement(pinning.pinned, False, tuple(notes))


@dataclass(frozen=True)
class Pinning:
    """Decision whether weights are page-locked.

    pinned: page-lock the weights.
    reason: one sentence for the user.
    """

    pinned: bool
    reason: str


def choose_pinning(mode: str, device: str, coming: int, available: int, windows: bool) -> Pinning:
    """Decide whether weights are page-locked.

    mode: 'auto', 'on' or 'off'. device: its type. coming: bytes of the weights that are not in RAM yet, but in a mapped
    file or on the device. available: bytes of free RAM, not counting the weights that are in RAM.
    """
    if device != "cuda":
        return Pinning(False, "Nothing is page-locked without a CUDA device.")
    if mode == "on":
        return Pinning(True, "The swapped blocks are page-locked, as pin_memory asks.")
    if mode == "off":
        return Pinning(False, "The swapped blocks go through a page-locked stage, as pin_memory asks.")
    if windows:
        return Pinning(
            False, "The swapped blocks go through a page-locked stage: Windows limits the memory that may be locked."
        )
    if available < coming + RESERVED_RAM:
        return Pinning(
            False,
            f"The swapped blocks go through a page-locked stage: locking them all would leave less than "
            f"{RESERVED_RAM // 2**30} GB of RAM for everything else.",
        )
    return Pinning(True, "The swapped blocks are page-locked.")


def unpinned_message(plain: int, blocks: int) -> str | None:
    """Return a sentence for the user if weights could not be page-locked as intended, else None.

    plain: number of such blocks.
    """
    if not plain:
        return None
    return (
        f"{plain} of {quantity(blocks, 'swapped block')} could not be page-locked and "
        f"{'goes' if plain == 1 else 'go'} through a page-locked stage; free some RAM, or set pin_memory to 'off'."
    )


def stream_from_file(mode: str, inside: int, needed: int, available: int) -> tuple[bool, str | None]:
    """Decide whether swapped blocks stream from their file; with a sentence for the user if RAM is short, else None.

    mode: pin_memory.
    inside: bytes of them in a mapped file.
    needed: bytes of all of them; the others are in RAM.
    available: bytes of free RAM.
    """
    room = available - RESERVED_RAM
    if inside <= room or mode == "on":
        return False, None
    short = f"RAM is short: {available / GIB:.1f} GB are free and the swapped blocks need {needed / GIB:.1f} GB"
    if not worth_streaming(inside, needed, room):
        return False, (
            f"{short}. They are in RAM already: only what Load Diffusion Model (Block Swap) loads from a safetensors "
            "file without converting it (weight_dtype 'default') can stream from its file."
        )
    return True, (
        f"{short}, so they stream from the model file. Each step is then as fast as your disk; set pin_memory to 'on' "
        "to keep them in RAM."
    )

"""Measure the rates of reading weights from their mapped file."""

import ctypes
import mmap
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .file_bandwidth import FileBandwidth
from .flat_weights import parts_of
from .mapped_file import FileMaps
from .pinning import RESERVED_RAM

PIECES, PIECE = 32, 4 * 2**20  # at most 128 MiB are read


def measure_file_bandwidth(
    tensors: Iterable[Tensor], mode: str, available: int, processes: int = 1
) -> FileBandwidth | None:
    """Measure reading these tensors from their mapped file; None if none of them is in one.

    mode: pin_memory, which leaves them in the file unless it is 'on'.
    available: bytes of free memory, counting the system's page cache as free.
    processes: number of processes that share that memory; they also share the page cache.
    """
    maps = FileMaps()
    inside = [part for tensor in tensors for part in parts_of(tensor) if part.is_contiguous() and maps.holds(part)]
    if not inside or mode == "on":
        return None
    disk, cache = read_speeds(pieces_of(inside))
    return FileBandwidth(disk, cache, available, available // processes - RESERVED_RAM)


def pieces_of(tensors: Sequence[Tensor], count: int = PIECES, size: int = PIECE) -> list[Tensor]:
    """Cut at most `count` pieces, (n,) uint8 with n up to `size`, out of these tensors, at equal distances."""
    flats = [tensor.detach().flatten().view(torch.uint8) for tensor in tensors]
    total = sum(flat.numel() for flat in flats)
    starts = [i * total // count for i in range(count)]
    pieces, offset = [], 0
    for flat in flats:
        local_starts = [start - offset for start in starts if offset <= start < offset + flat.numel()]
        pieces += [
            flat[start : min(end, start + size)]
            for start, end in pairwise([*local_starts, flat.numel()])
            if start < end
        ]
        offset += flat.numel()
    return pieces


def read_speeds(pieces: Sequence[Tensor]) -> tuple[float, float]:
    """Measure (disk, cache) of a `FileBandwidth`, in bytes per second.

    pieces: as cut by `pieces_of`.

    Each piece is read twice: first from the disk unless it is in the cache, then from the cache. If all pieces are in
    the cache, the disk's rate is unknown and the first reading is used in its place.
    """
    buffer = torch.zeros(max(piece.numel() for piece in pieces), dtype=torch.uint8)
    from_disk = [not in_cache(piece) for piece in pieces]
    if not any(from_disk):
        from_disk = [True] * len(pieces)
    first = [_seconds(buffer, piece) for piece in pieces]
    second = [_seconds(buffer, piece) for piece in pieces]
    sizes = [piece.numel() for piece in pieces]
    cache = sum(sizes) / sum(second)
    cold = [(size, seconds) for size, seconds, cold in zip(sizes, first, from_disk, strict=True) if cold]
    return min(cache, sum(size for size, _ in cold) / sum(seconds for _, seconds in cold)), cache


def in_cache(piece: Tensor) -> bool:
    """Return True if the system's page cache holds more than half of the piece.

    Always False except on Linux, which can be queried by mincore(2).
    """
    if sys.platform != "linux":
        return False
    start = piece.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = piece.data_ptr() + piece.numel() - start
    pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), pages) != 0:
        return False
    return 2 * sum(page & 1 for page in pages) > len(pages)


def _seconds(buffer: Tensor, piece: Tensor) -> float:
    started = time.perf_counter()
    buffer[: piece.numel()].copy_(piece)
    return max(time.perf_counter() - started, 1e-9)

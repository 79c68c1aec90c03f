"""Oldest torch that the pack runs with, and what versions of torch differ in."""

import re

OLDEST = (2, 11)
_FIRST_WITHOUT_COPIES = (2, 14)


def check_torch(version: str) -> None:
    """Check torch's version. Raises RuntimeError if it is too old."""
    if _is_before(version, OLDEST):
        needed = ".".join(map(str, OLDEST))
        raise RuntimeError(f"Tessera needs torch {needed} or newer, and ComfyUI runs with {version}; update torch.")


def copies_addend(version: str) -> bool:
    """Return True if CUDA's torch.addmm(y, a, b) of this version copies y before it adds to it. From 2.14 on cuBLASLt
    takes y from its own place: `gemm_and_bias` in ATen/cuda/CUDABlas.h has it as an argument."""
    return _is_before(version, _FIRST_WITHOUT_COPIES)


def _is_before(version: str, first: tuple[int, int]) -> bool:
    """Return False for a version that can't be read, as of a build of one's own."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) < first

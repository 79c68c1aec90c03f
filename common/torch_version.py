"""Oldest torch that the pack runs with."""

import re

OLDEST = (2, 11)


def check_torch(version: str) -> None:
    """Check torch's version. Raises RuntimeError if it is too old."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is not None and (int(match[1]), int(match[2])) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise RuntimeError(f"Tessera needs torch {needed} or newer, and ComfyUI runs with {version}; update torch.")

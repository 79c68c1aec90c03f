"""Oldest torch that the pack runs with."""

import re

OLDEST = (2, 11)


def check_torch(version: str) -> None:
    """Check torch's version. Raises RuntimeError for one that is too old."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise RuntimeError(f"Tessera needs torch {needed} or newer, and ComfyUI runs with {version}; update torch.")

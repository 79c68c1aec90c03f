"""Processes that train one LoRA together, as set up by run.py."""

import os

SWITCH = "TESSERA_WORLD_OF"  # run.py puts the number of its process here


def is_switched_on() -> bool:
    """Return whether run.py started this process as one of several."""
    return os.environ.get(SWITCH) == str(os.getpid())


def processes_here() -> int:
    """Return the number of processes that train together on this machine, this one included."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_switched_on() else 1

"""Processes that train one LoRA together: which of them this one is, by what run.py says."""

import os

SWITCH = "TESSERA_WORLD_OF"  # run.py puts the number of its process here


def is_switched_on() -> bool:
    """True where run.py has started this process as one of several."""
    return os.environ.get(SWITCH) == str(os.getpid())


def processes_here() -> int:
    """Return the number of processes that train together on this machine, this one counted."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_switched_on() else 1

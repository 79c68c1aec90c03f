"""Processes that find each other after each restart by torchrun."""

import time
import uuid
from typing import Any


def common_name(store: Any, rank: int, size: int, seconds: float) -> str:
    """Meet the other processes that torchrun has started with this one; returns a name that these alone know.

    torchrun's agents may keep a store through restarts, with what the processes before have told in it. Nothing in a
    process's environment tells one start from another: TORCHELASTIC_RESTART_COUNT stays where a machine joins or goes,
    and each machine counts by itself. So rank 0 gives the name, to whom it answers; it answers to dead ones too, which
    nobody reads, until all that it has to meet have said that they took it.

    store: torch's key-value store that all of them reach. seconds: longest wait. Raises TimeoutError past it.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + seconds

    def read(key: str) -> str:
        return str(store.get(key).decode()) if store.check([key]) else ""

    def pause() -> None:
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.02)

    if rank:
        store.set(f"here/{rank}", own)
        while not (told := read(f"answer/{rank}")).startswith(own):
            pause()
        name = told.removeprefix(own)
        store.set(f"taken/{rank}", name)
        return name
    answered, left = dict[int, str](), set(range(1, size))
    while left := {other for other in left if read(f"taken/{other}") != own}:
        for other in left:
            if (here := read(f"here/{other}")) and answered.get(other) != here:
                answered[other] = here
                store.set(f"answer/{other}", here + own)
        pause()
    return own

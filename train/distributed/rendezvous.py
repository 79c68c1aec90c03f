"""Rendezvous of the processes after each restart by torchrun."""

import time
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store


def common_name(store: "Store", rank: int, world_size: int, seconds: float) -> str:
    """Meet the other processes that torchrun started with this one; returns a name that only these know.

    torchrun's agents may keep a store through restarts, including the keys of earlier processes. Nothing in a process's
    environment distinguishes one start from another: TORCHELASTIC_RESTART_COUNT does not change when a machine joins or
    leaves, and each machine counts by itself. So rank 0 picks the name and answers every process that announces itself,
    dead ones included, whose answers nobody reads, until all ranks have confirmed the name.

    store: torch's key-value store that all of them reach. seconds: longest wait. Raises TimeoutError after it.
    """
    token, end = uuid.uuid4().hex, time.monotonic() + seconds

    def read(key: str) -> str:
        return str(store.get(key).decode()) if store.check([key]) else ""

    def pause() -> None:
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.02)

    if rank:
        store.set(f"here/{rank}", token)
        while not (answer := read(f"answer/{rank}")).startswith(token):
            pause()
        name = answer.removeprefix(token)
        store.set(f"taken/{rank}", name)
        return name
    answered, pending = dict[int, str](), set(range(1, world_size))
    while pending := {other for other in pending if read(f"taken/{other}") != token}:
        for other in pending:
            if (other_token := read(f"here/{other}")) and answered.get(other) != other_token:
                answered[other] = other_token
                store.set(f"answer/{other}", other_token + token)
        pause()
    return token

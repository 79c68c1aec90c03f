"""World of this process, as started by run.py and torchrun."""

import os
from functools import cache

import torch.distributed as dist

from ...common.processes import is_switched_on, processes_here
from .rounds import common_name
from .world import LONE, STEP_LIMIT, World


@cache
def current_world() -> World:
    """Return the world of this process: from torchrun's environment under run.py, otherwise a single-process world.

    RANK and WORLD_SIZE alone are not enough: whatever started an ordinary server may have set them. The first call
    waits for the other ranks. Raises TimeoutError if they do not arrive.
    """
    if not is_switched_on():
        return LONE
    store, rank, size = next(dist.rendezvous("env://", timeout=STEP_LIMIT))
    local = processes_here(), int(os.environ.get("LOCAL_RANK", "0"))
    name = common_name(dist.PrefixStore("tessera", store), rank, size, STEP_LIMIT.total_seconds())
    return World(rank, size, dist.PrefixStore(f"tessera/{name}", store), *local)

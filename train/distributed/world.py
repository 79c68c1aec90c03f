"""World of a run: its processes, one per device, and their communication."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ...common.processes import is_switched_on, processes_here
from ..report.errors import CannotContinue, error_sentence
from .collectives import Collectives, WaitTime, WorldOptions
from .faults import Faults, Interrupts
from .rendezvous import common_name
from .share import Share, shard_step
from .store import RunStore, Topic

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")


class World:
    """Processes that train one LoRA together; a single process has no overhead.

    Each has a rank, and rank 0 writes all files, makes the previews and reports.

    store: messages of the ranks. A wait for one may last as long as needed.
    collectives: sums of gradients, in which a process without the others would hang, and barriers before them.
    faults: the first fault of a rank, which ends the run on all of them.
    interrupts: interrupts of this rank.
    wait_time: seconds that this rank has waited for others.
    local_size: ranks on this machine.
    local_rank: index of this rank among them, by default as torchrun numbers them.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        store: "Store | None" = None,
        local_size: int = 1,
        local_rank: int | None = None,
        options: WorldOptions | None = None,
    ) -> None:
        """store: torch's key-value store that all ranks reach; None for a single process."""
        self.rank = rank
        self.world_size = world_size
        self.local_size = local_size
        self.local_rank = rank % local_size if local_rank is None else local_rank
        self.options = options or WorldOptions()
        self.store = RunStore(store)
        self.faults = Faults(rank, self.store)
        self.interrupts = Interrupts()
        self.wait_time = WaitTime()
        self.collectives = Collectives(
            range(world_size), self.store, self.faults, self.interrupts, self.wait_time, self.options
        )

    @property
    def is_first(self) -> bool:
        """Return whether this process writes files and reports."""
        return self.rank == 0

    def begin_run(self, check_interrupted: Callable[[], None]) -> None:
        """Begin a run with its own keys, so that messages of earlier runs are not read.

        check_interrupted: called while this rank waits, and may raise.
        """
        self.store.begin_run()
        self.collectives.begin_run()
        self.interrupts.watch(check_interrupted)
        self.wait_time.begin_run()

    def connect(self, device: torch.device) -> None:
        """Create the process group for sums once all ranks have arrived; a second call does nothing."""
        if self.world_size > 1 and not dist.is_initialized():
            self.all_gather("arrival", True)
            self.collectives.connect(device)

    def shard(self, batch_size: int, accumulation: int) -> Share:
        """Return this rank's share of a step, see `shard_step`."""
        return shard_step(self.rank, self.world_size, batch_size, accumulation)

    def all_gather(self, name: str, value: T, ranks: range | None = None) -> list[T]:
        """Return the values of the ranks, in their order. All of them must call it.

        name: unique in a run.
        value: plain JSON.
        ranks: participants, including this rank; None for all.
        """
        if self.world_size == 1:
            return [value]
        self.store.set_once(Topic.GATHER, [value], f"{name}/{self.rank}")
        ranks = ranks or range(self.world_size)
        return [self.wait(Topic.GATHER, f"{name}/{rank}")[0] for rank in ranks]

    def broadcast(self, name: str, value: T) -> T:
        """Return rank 0's value on every rank. name: unique in a run. value: plain JSON."""
        if self.world_size == 1:
            return value
        if self.is_first:
            self.store.set_once(Topic.BROADCAST, [value], name)
            return value
        result: T = self.wait(Topic.BROADCAST, name)[0]
        return result

    def wait(self, topic: Topic, name: str = "", condition: Callable[[Any], bool] = lambda value: True) -> Any:
        """Wait for a message that satisfies the condition, and return it.

        Raises the exception of `Faults.exception` if another rank ends the run meanwhile, and CannotContinue past the
        limit.
        """
        start = time.monotonic()
        pause = 0.005
        limit = self.options.first_timeout
        try:
            while True:
                # Read before the value: a rank writes that before it may end the run over another rank's value.
                fault = self.faults.first()
                value = self.store.get(topic, name)
                if value is not None and condition(value):
                    return value
                if fault is not None:
                    raise self.faults.exception(fault)
                self.interrupts.check()
                if time.monotonic() - start > limit:
                    raise CannotContinue(f"Another device has not answered for {limit:.0f} s.")
                time.sleep(pause)
                pause = min(0.1, 1.5 * pause)
        finally:
            self.wait_time.add(time.monotonic() - start)

    def wait_for_first(self, step: int, due: bool) -> None:
        """Wait until rank 0 has finished its work after `step` steps, if any is `due`, as long as that takes."""
        if self.world_size > 1 and self.is_first:
            self.store.set(Topic.FINISHED_STEP, step)
        elif due and not self.is_first:
            self.wait(Topic.FINISHED_STEP, condition=lambda finished_step: bool(finished_step >= step))

    @contextmanager
    def after_first(self, name: str, check_interrupted: Callable[[], None]) -> Iterator[None]:
        """Context that rank 0 executes first and the others after it, such as filling a cache that they read.

        name: unique in the lifetime of this process.
        """
        if self.world_size == 1:
            yield
            return
        self.interrupts.watch(check_interrupted)
        with self.aborting():
            if not self.is_first:
                self.wait(Topic.AFTER_FIRST, name)
            yield
        if self.is_first:
            self.store.set(Topic.AFTER_FIRST, True, name)

    def abort(self, error: BaseException, sentence: str) -> None:
        """Report to the other ranks that this rank ends the run, so that none of them waits for it.

        sentence: the cause, for the user.
        """
        if self.world_size > 1:
            self.faults.report(error, sentence)

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Context that reports an error inside it to the other ranks."""
        try:
            yield
        except BaseException as error:
            self.abort(error, error_sentence(error))
            raise

    def facts(self) -> dict[str, int | float]:
        """Return entries for the summary: the number of devices, and the seconds that rank 0 waited for others."""
        if self.world_size == 1:
            return {}
        return {"world_size": self.world_size, "seconds_waiting": round(self.wait_time.seconds, 3)}


SINGLE_PROCESS = World()


@cache
def current_world() -> World:
    """Return the world of this process: from torchrun's environment under run.py, otherwise a single-process world.

    RANK and WORLD_SIZE alone are not enough: whatever started an ordinary server may have set them. The first call
    waits for the other ranks. Raises TimeoutError if they do not arrive.
    """
    if not is_switched_on():
        return SINGLE_PROCESS
    timeout = WorldOptions().step_timeout
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    name = common_name(dist.PrefixStore("tessera", store), rank, world_size, timeout.total_seconds())
    run_store = dist.PrefixStore(f"tessera/{name}", store)
    return World(rank, world_size, run_store, processes_here(), int(os.environ.get("LOCAL_RANK", "0")))

"""Ranks of one machine that shard the blocks of a model: their gathers, and the barriers that order the gathers."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from ..config.settings import MemoryOptions
from ..report.errors import CannotContinue
from .barrier import GRACE, BrokenBarrier
from .store import Topic
from .world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

gather_pieces = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the first is the newer name
TRIAL_BYTES = {"cuda": 64 * 2**20, "cpu": 2**20}


class NodeRanks:
    """Ranks of one machine; implements `memory.swap.sharded.Peers`.

    They gather in a process group of their own: the sum of gradients uses another, and never overlaps with a gather.

    count: number of ranks.
    index: index of this rank among them.
    gathered: event recorded after the last queued gather; None on a CPU.
    """

    def __init__(self, world: World, ranks: range, group: "ProcessGroup | None") -> None:
        """group: process group of these ranks; None in tests that queue no gather."""
        self.world = world
        self.ranks = ranks
        self.group = group
        self.count, self.index = len(ranks), ranks.index(world.rank)
        self.gathered: torch.cuda.Event | None = None
        self.begin_run()

    def begin_run(self) -> None:
        """Begin a run: all ranks restart their counts of barriers and messages."""
        self._barriers = self._messages = 0
        self._has_lost_rank = False

    @property
    def _name(self) -> str:
        return f"blocks of {self.ranks.start}"

    def gather(self, output: Tensor, piece: Tensor) -> None:
        """Queue an all-gather of every rank's piece on the current stream; on a CPU it is synchronous.

        output: (count·n,), piece: (n,), bytes. Raises CannotContinue if a rank is gone, and AcceleratorError if this
        rank's device has failed.
        """
        if self._has_lost_rank:
            raise CannotContinue("Another device is gone.")
        try:
            gather_pieces(output, piece, group=self.group)
        except torch.AcceleratorError:  # this rank's own device failed
            raise
        except Exception as error:
            raise self._lost_rank_error() from error
        if output.device.type == "cuda":
            self.gathered = torch.cuda.current_stream(output.device).record_event()

    def barrier(self, request: str, fresh: bool) -> list[tuple[str, bool]]:
        """Wait until all ranks have arrived at the next barrier. Returns their arguments, by index.

        A rank arrives after it has queued every earlier gather, so a queued gather never waits for a barrier. Raises
        the exception of `Faults.exception` if a rank aborts, and CannotContinue if one does not arrive.
        """
        world, start = self.world, time.monotonic()
        self._barriers += 1
        try:
            arguments = world.collectives.barrier(self._name, self._barriers, [request, fresh], self.ranks)
        except BrokenBarrier as broken:
            if broken.joins_sum:
                raise world.faults.exception(world.faults.first()) from broken
            self._has_lost_rank = True
            # A rank that aborts reports why only afterwards.
            seconds = 0.0 if broken.aborting_rank == world.rank else GRACE
            raise self._missing_ranks_error(broken.missing, seconds) from broken
        except BaseException:  # an interrupt, and the other ranks do not arrive
            self._has_lost_rank = True
            self.abort_gathers()
            raise
        world.wait_time.add(time.monotonic() - start)
        return [(rank_request, rank_fresh) for rank_request, rank_fresh in arguments]

    def abort(self, complete: bool) -> None:
        """Announce that this rank passes no further barrier. Raises CannotContinue if another rank is gone.

        complete: it has queued every gather that the others wait for; else they abort theirs, and do not wait for it in
            a sum.
        """
        barrier = self.world.collectives.barrier_at(self._name, self._barriers + 1, self.ranks)
        barrier.abort(joins_sum=complete and not self._has_lost_rank)
        if self._has_lost_rank:
            raise CannotContinue("Another device is gone.")

    def abort_gathers(self) -> None:
        """Abort queued gathers: they would wait forever for a rank that is gone, and no LoRA could be saved."""
        if (abort := getattr(self.group, "abort", None)) is not None and dist.get_backend(self.group) == "nccl":
            abort()

    def all_gather(self, value: T) -> list[T]:
        """Return the ranks' values, by index. value: plain JSON. All ranks must call it."""
        self._messages += 1
        return self.world.all_gather(f"{self._name}, {self._messages}", value, self.ranks)

    def bandwidth(self, device: torch.device) -> float:
        """Measure the gather bandwidth in bytes/s: the slowest rank's best of three. All ranks must call it."""
        piece = torch.zeros(TRIAL_BYTES.get(device.type, TRIAL_BYTES["cpu"]), dtype=torch.uint8, device=device)
        output = torch.empty(len(piece) * self.count, dtype=torch.uint8, device=device)
        self.all_gather("begin")
        seconds = min(self._seconds(output, piece) for _ in range(3))
        return len(output) / max(self.all_gather(seconds))

    def _seconds(self, output: Tensor, piece: Tensor) -> float:
        start = time.perf_counter()
        self.gather(output, piece)
        if output.device.type == "cuda":
            torch.cuda.synchronize(output.device)
        return time.perf_counter() - start

    def _lost_rank_error(self) -> BaseException:
        """Build the exception for a lost rank: one that does not report the loss like the others."""
        self._has_lost_rank = True
        try:
            self.world.store.set(Topic.LOST_PEER, True, str(self.world.rank))
            end = time.monotonic() + GRACE
            missing = list(self.ranks)
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not self.world.store.get(Topic.LOST_PEER, str(rank))]
                time.sleep(0.05)
            return self._missing_ranks_error(missing)
        except Exception:  # the store is gone with the launcher
            return self._missing_ranks_error([])

    def _missing_ranks_error(self, missing: Sequence[int], seconds: float = 0.0) -> BaseException:
        """Build the exception for these lost ranks. seconds: wait for another rank to report why."""
        self.abort_gathers()
        faults = self.world.faults
        return faults.missing_ranks_error(missing, "share its part of the model", faults.first(seconds))


def free_host_memory(world: World) -> int:
    """Return the free bytes of host memory before any rank of this machine allocates; all ranks must call it.

    Each rank may use an equal part. A rank that measured for itself would see only the memory that the others left.
    """
    first = world.rank - world.local_rank
    free = psutil.virtual_memory().available
    return int(min(world.all_gather("free memory", free, range(first, first + world.local_size))))


def connect_node(world: World, device: torch.device, memory: MemoryOptions) -> NodeRanks | None:
    """Connect the ranks of each machine to shard blocks, if that is requested; all ranks must call it.

    Returns None if this machine has one rank, or `shards` is False.
    """
    if world.world_size == 1 or not shards(memory):
        return None
    node = world.collectives.node
    if isinstance(node, NodeRanks):
        node.begin_run()
        return node
    local_span = [world.rank - world.local_rank, world.local_size]
    own_node: NodeRanks | None = None
    for first, size in sorted({tuple(span) for span in world.all_gather("node", local_span)}):
        ranks = range(first, first + size)
        if size > 1:
            group = dist.new_group(list(ranks), timeout=world.options.step_timeout)
            if world.rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                own_node = NodeRanks(world, ranks, group)
                world.collectives.attach(own_node)
    return own_node


def shards(memory: MemoryOptions) -> bool:
    """Return whether the devices of a machine are to shard blocks, if there are several and blocks are swapped."""
    return memory.shard and memory.blocks_to_swap != 0


def check_shard(world: World, device: torch.device, memory: MemoryOptions) -> None:
    """Raise ValueError if blocks are to be sharded without NCCL."""
    has_nccl = device.type == "cuda" and dist.is_nccl_available()
    if shards(memory) and world.local_size > 1 and not has_nccl and not world.options.gloo_gathers:
        raise ValueError(
            "shard is on and needs NCCL between the devices, which torch has for NVIDIA's GPUs on Linux only; switch "
            "shard off on Training Memory."
        )

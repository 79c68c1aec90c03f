"""Ranks of one machine that shard the blocks of a model: their gathers, and the meetings that order the gathers."""

import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CannotContinue
from ..settings import MemoryOptions
from .meeting import GRACE, Unmet
from .world import World

gather_pieces = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the first is the newer name
TRIAL_BYTES = {"cuda": 64 * 2**20, "cpu": 2**20}


class NodeRanks:
    """Ranks of one machine; implements `memory.swap.sharded.Peers`.

    They gather in a process group of their own: the sum of gradients uses another, and never overlaps with a gather.

    gathered: event recorded after the last queued gather; None on a CPU.
    gathers, bytes_gathered: counters.
    """

    def __init__(self, world: World, ranks: range, group: Any):
        self.world, self.ranks, self.group = world, ranks, group
        self.count, self.place = len(ranks), ranks.index(world.rank)
        self.gathers, self.bytes_gathered, self.gathered = 0, 0, None
        self._name = f"blocks of {ranks.start}"
        self.begin_run()

    def begin_run(self) -> None:
        """Begin a run: all ranks restart the count of meetings."""
        self._number, self._exchanges, self._lost_one = 0, 0, False

    def gather(self, output: Tensor, piece: Tensor) -> None:
        """Queue an all-gather of every rank's piece on the current stream; on a CPU it is synchronous.

        output: (count·n,), piece: (n,), bytes. Raises CannotContinue if a rank is gone, and AcceleratorError if this
        rank's device has failed.
        """
        if self._lost_one:
            raise CannotContinue("Another device is gone.")
        try:
            gather_pieces(output, piece, group=self.group)
        except torch.AcceleratorError:  # this rank's own device failed
            raise
        except Exception as error:
            raise self._lost_rank_error() from error
        if output.device.type == "cuda":
            self.gathered = torch.cuda.current_stream(output.device).record_event()
        self.gathers, self.bytes_gathered = self.gathers + 1, self.bytes_gathered + output.numel()

    def meet(self, wish: str, fresh: bool) -> list[tuple[str, bool]]:
        """Wait until all ranks have arrived at this meeting. Returns their values, by index.

        A rank arrives after it has queued every earlier gather, so a queued gather never waits for a meeting. Raises
        the exception of `World.stopped` if a rank leaves, and CannotContinue if one does not arrive.
        """
        world, start = self.world, time.monotonic()
        self._number += 1
        try:
            answers = world.meet(self._name, self._number, [wish, fresh], self.ranks)
        except Unmet as unmet:
            if unmet.comes:
                raise world.stopped(world.fault()) from unmet
            self._lost_one = True
            # A rank that left reports why only after it has left.
            raise self._missing(unmet.missing, 0.0 if unmet.leaving_rank == world.rank else GRACE) from unmet
        except BaseException:  # an interrupt, and the other ranks do not arrive
            self._lost_one = True
            self.abort()
            raise
        world.seconds_waited += time.monotonic() - start
        return [(answer[0], answer[1]) for answer in answers]

    def leave(self, whole: bool) -> None:
        """Announce that this rank joins no other meeting. Raises CannotContinue if another rank is gone.

        whole: it has queued every gather that the others wait for; else they abort theirs, and do not wait for it in a
            sum.
        """
        self.world.meeting(self._name, self._number + 1, self.ranks).leave(comes=whole and not self._lost_one)
        if self._lost_one:
            raise CannotContinue("Another device is gone.")

    def abort(self) -> None:
        """Abort queued gathers: they would wait forever for a rank that is gone, and no LoRA could be saved."""
        if (abort := getattr(self.group, "abort", None)) is not None and dist.get_backend(self.group) == "nccl":
            abort()

    def exchange(self, value: Any) -> list[Any]:
        """Return the ranks' values, by index. value: plain JSON. All ranks must call it."""
        self._exchanges += 1
        return self.world.exchange(f"exchange {self._exchanges}", value, self.ranks)

    def bandwidth(self, device: torch.device) -> float:
        """Measure the gather bandwidth in bytes/s: the slowest rank's best of three. All ranks must call it."""
        piece = torch.zeros(TRIAL_BYTES.get(device.type, TRIAL_BYTES["cpu"]), dtype=torch.uint8, device=device)
        output = torch.empty(len(piece) * self.count, dtype=torch.uint8, device=device)
        self.exchange("begin")
        seconds = min(self._seconds(output, piece) for _ in range(3))
        return len(output) / max(self.exchange(seconds))

    def _seconds(self, output: Tensor, piece: Tensor) -> float:
        start = time.perf_counter()
        self.gather(output, piece)
        if output.device.type == "cuda":
            torch.cuda.synchronize(output.device)
        return time.perf_counter() - start

    def _lost_rank_error(self) -> BaseException:
        """Build the exception for a lost rank: one that does not report the loss like the others."""
        self._lost_one = True
        try:
            self.world.post(f"lost/{self.world.rank}", True)
            end = time.monotonic() + GRACE
            missing = list(self.ranks)
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not self.world.read(f"lost/{rank}")]
                time.sleep(0.05)
            return self._missing(missing)
        except Exception:  # the store is gone with the launcher
            return self._missing([])

    def _missing(self, ranks: list[int], seconds: float = 0.0) -> BaseException:
        """Build the exception for these lost ranks. seconds: wait for another rank to report why."""
        self.abort()
        return self.world.unreached_error(ranks, "share its part of the model", self.world.fault(seconds))


def free_host_memory(world: World) -> int:
    """Return the free bytes of host memory before any rank of this machine allocates; all ranks must call it.

    Each rank may use an equal part. A rank that measured for itself would see only the memory that the others left.
    """
    first = world.rank - world.local_rank
    free = psutil.virtual_memory().available
    return int(min(world.exchange("free memory", free, range(first, first + world.local_size))))


def connect_node(world: World, device: torch.device, memory: MemoryOptions) -> NodeRanks | None:
    """Connect the ranks of each machine to shard blocks, if that is requested; all ranks must call it.

    Returns None if this machine has one rank, or `shards` is False.
    """
    if world.is_lone or not shards(memory):
        return None
    if isinstance(world.node, NodeRanks):
        world.node.begin_run()
        return world.node
    local_span = [world.rank - world.local_rank, world.local_size]
    for first, size in sorted({tuple(span) for span in world.exchange("node", local_span)}):
        ranks = range(first, first + size)
        if size > 1:
            group = dist.new_group(list(ranks), timeout=world.step_limit)
            if world.rank in ranks:
                world.node = NodeRanks(world, ranks, group)
    return world.node if isinstance(world.node, NodeRanks) else None


def shards(memory: MemoryOptions) -> bool:
    """Return whether the devices of a machine are to shard blocks, if there are several and blocks are swapped."""
    return memory.shard and memory.blocks_to_swap != 0


def check_shard(world: World, device: torch.device, memory: MemoryOptions) -> None:
    """Raise ValueError if blocks are to be sharded without NCCL."""
    has_nccl = device.type == "cuda" and dist.is_nccl_available()
    if shards(memory) and world.local_size > 1 and not has_nccl and not world.gathers_by_gloo:
        raise ValueError(
            "shard is on and needs NCCL between the devices, which torch has for NVIDIA's GPUs on Linux only; switch "
            "shard off on Training Memory."
        )


def shard_notes(world: World, memory: MemoryOptions) -> tuple[str, ...]:
    """Return a sentence if there is no other device to shard blocks with."""
    if not shards(memory) or world.local_size > 1:
        return ()
    return (
        "shard is not used: only one device of this machine trains, so there is no other to share the blocks with.",
    )

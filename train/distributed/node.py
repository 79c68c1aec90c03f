"""Devices of one machine that share the blocks of a model: their gathers, and the meetings that keep these in order."""

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

gather_pieces = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer name of the same
TRIAL_BYTES = {"cuda": 64 * 2**20, "cpu": 2**20}


class NodeRanks:
    """Ranks of one machine, as `memory.swap.sharded.Peers`.

    They gather over connections of their own: the sum of gradients has others, and never runs beside a gather.

    gathered: event behind the gather that was queued last; None on a CPU.
    gathers, bytes_gathered: counters.
    """

    def __init__(self, world: World, ranks: range, group: Any):
        self.world, self.ranks, self.group = world, ranks, group
        self.count, self.place = len(ranks), ranks.index(world.rank)
        self.gathers, self.bytes_gathered, self.gathered = 0, 0, None
        self._name = f"blocks of {ranks.start}"
        self.begin_run()

    def begin_run(self) -> None:
        """Begin a run: all ranks count its meetings from the first."""
        self._number, self._exchanges, self._lost_one = 0, 0, False

    def gather(self, into: Tensor, piece: Tensor) -> None:
        """Queue a gather of everyone's piece on the current stream; on a CPU it is done at once.

        into: (count·n,), piece: (n,), bytes. Raises CannotContinue where a rank is gone, and AcceleratorError where
        this rank's device has failed.
        """
        if self._lost_one:
            raise CannotContinue("Another device is gone.")
        try:
            gather_pieces(into, piece, group=self.group)
        except torch.AcceleratorError:  # of this rank's own device
            raise
        except Exception as error:
            raise self._lost() from error
        if into.device.type == "cuda":
            self.gathered = torch.cuda.current_stream(into.device).record_event()
        self.gathers, self.bytes_gathered = self.gathers + 1, self.bytes_gathered + into.numel()

    def meet(self, wish: str, fresh: bool) -> list[tuple[str, bool]]:
        """Wait until all ranks have come to this meeting. Returns what each has given, by place.

        A rank comes when it has queued every gather before: so what one has queued does never wait for a meeting.
        Raises what `World.stopped` makes where a rank leaves, and CannotContinue where one does not come.
        """
        world, begun = self.world, time.monotonic()
        self._number += 1
        try:
            found = world.meet(self._name, self._number, [wish, fresh], self.ranks)
        except Unmet as unmet:
            if unmet.comes:
                raise world.stopped(world.fault()) from unmet
            self._lost_one = True
            # Who has left says why, after it has left.
            raise self._missing(unmet.missing, 0.0 if unmet.left == world.rank else GRACE) from unmet
        except BaseException:  # an interrupt, and the others do not come
            self._lost_one = True
            self.abort()
            raise
        world.waited += time.monotonic() - begun
        return [(given[0], given[1]) for given in found]

    def leave(self, whole: bool) -> None:
        """Say that this rank comes to no other meeting. Raises CannotContinue where another rank is gone.

        whole: it has queued all that the others wait for; else they end their gathers, and do not wait for it in a sum.
        """
        self.world.meeting(self._name, self._number + 1, self.ranks).leave(comes=whole and not self._lost_one)
        if self._lost_one:
            raise CannotContinue("Another device is gone.")

    def abort(self) -> None:
        """End what is queued of gathers: it would wait for ever for a rank that is gone, and no LoRA could be saved."""
        if (abort := getattr(self.group, "abort", None)) is not None and dist.get_backend(self.group) == "nccl":
            abort()

    def exchange(self, value: Any) -> list[Any]:
        """Return what each rank gives, by place. value: plain JSON. All have to call it."""
        self._exchanges += 1
        return self.world.exchange(f"exchange {self._exchanges}", value, self.ranks)

    def bandwidth(self, device: torch.device) -> float:
        """Measure bytes per second at which a slot is gathered, the slowest rank's best of three. All call it."""
        piece = torch.zeros(TRIAL_BYTES.get(device.type, TRIAL_BYTES["cpu"]), dtype=torch.uint8, device=device)
        into = torch.empty(len(piece) * self.count, dtype=torch.uint8, device=device)
        self.exchange("begin")
        seconds = min(self._seconds(into, piece) for _ in range(3))
        return len(into) / max(self.exchange(seconds))

    def _seconds(self, into: Tensor, piece: Tensor) -> float:
        begun = time.perf_counter()
        self.gather(into, piece)
        if into.device.type == "cuda":
            torch.cuda.synchronize(into.device)
        return time.perf_counter() - begun

    def _lost(self) -> BaseException:
        """Say which rank is gone, by which of the others have come to say the same."""
        self._lost_one = True
        try:
            self.world.post(f"lost/{self.world.rank}", True)
            end = time.monotonic() + GRACE
            missing = list(self.ranks)
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not self.world.read(f"lost/{rank}")]
                time.sleep(0.05)
            return self._missing(missing)
        except Exception:  # the store went with the launcher
            return self._missing([])

    def _missing(self, ranks: list[int], seconds: float = 0.0) -> BaseException:
        """Say that these ranks are gone. seconds: in which another may still say why."""
        self.abort()
        return self.world.gone(ranks, "share its part of the model", self.world.fault(seconds))


def free_host_memory(world: World) -> int:
    """Return the free bytes of this machine's memory before any rank of it takes some; all ranks have to call it.

    Each may take an equal part. One that looked for itself would find what the others have left.
    """
    first = world.rank - world.local_rank
    free = psutil.virtual_memory().available
    return int(min(world.exchange("free memory", free, range(first, first + world.local_size))))


def connect_node(world: World, device: torch.device, memory: MemoryOptions) -> NodeRanks | None:
    """Connect the ranks of each machine to share blocks, where that is asked for; all ranks have to call it.

    None where this machine has one rank, or `shards` is False.
    """
    if world.is_lone or not shards(memory):
        return None
    if isinstance(world.node, NodeRanks):
        world.node.begin_run()
        return world.node
    own = [world.rank - world.local_rank, world.local_size]
    for first, size in sorted({tuple(found) for found in world.exchange("node", own)}):
        ranks = range(first, first + size)
        if size > 1:
            group = dist.new_group(list(ranks), timeout=world.step_limit)
            if world.rank in ranks:
                world.node = NodeRanks(world, ranks, group)
    return world.node if isinstance(world.node, NodeRanks) else None


def shards(memory: MemoryOptions) -> bool:
    """Return True where the devices of a machine are to share blocks, if there are several and blocks are swapped."""
    return memory.shard and memory.blocks_to_swap != 0


def check_shard(world: World, device: torch.device, memory: MemoryOptions) -> None:
    """Raise ValueError where blocks are to be shared without NCCL."""
    has_nccl = device.type == "cuda" and dist.is_nccl_available()
    if shards(memory) and world.local_size > 1 and not has_nccl and not world.gathers_by_gloo:
        raise ValueError(
            "shard is on and needs NCCL between the devices, which torch has for NVIDIA's GPUs on Linux only; switch "
            "shard off on Training Memory."
        )


def shard_notes(world: World, memory: MemoryOptions) -> tuple[str, ...]:
    """Return a sentence where there is no other device to share blocks with."""
    if not shards(memory) or world.local_size > 1:
        return ()
    return (
        "shard is not used: only one device of this machine trains, so there is no other to share the blocks with.",
    )

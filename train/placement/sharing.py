"""Sharing of blocks by the devices of a machine: one memory plan for all, and their forwards together."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...memory.swap.plan import SwapPlan, Way
from ...memory.swap.sharded import OutOfMemoryElsewhere, ShardedRing, ShardedSwap
from ...memory.swap.training import BlockSwap
from ...memory.weights.residency import Holder
from ..distributed.node import NodeRanks
from ..distributed.world import World
from ..settings import MemoryOptions
from .auto import AutomaticMemory, StepCost


class SharedBlocks:
    """Agreements of a run with those that share its blocks; none where nobody does.

    node: those ranks; None where nobody shares.
    swap: the run's block swap.
    """

    def __init__(self, world: World, node: NodeRanks | None, device: torch.device):
        self.world, self.node, self.device = world, node, device
        self.swap: BlockSwap | None = None

    @property
    def ring(self) -> ShardedRing | None:
        """The ring that is filled together."""
        return self.swap.ring if isinstance(self.swap, ShardedSwap) else None

    def plan(
        self, asked: MemoryOptions, measured: StepCost, order: tuple[str, ...], before: Way | None
    ) -> tuple[AutomaticMemory, str]:
        """Plan a run, see `AutomaticMemory`. Returns the plan, and why blocks are not shared; empty where they are.

        All devices of a machine go by the plan of the first one, which is made for the one that has least room.
        """
        own = AutomaticMemory(asked, measured, order, before)
        if self.node is None:
            return own, ""
        link, count = self.node.bandwidth(self.device), self.node.count
        told = self.node.exchange([measured.machine.free, measured.other_bytes])
        machine = replace(measured.machine, free=min(free for free, _ in told), link=link, file=None, shards=count)
        cost = replace(measured, machine=machine, other_bytes=max(other for _, other in told))
        shared = AutomaticMemory(asked, cost, order, before)
        self.agreed(shared, shared.plan)
        all_fit, reason = all(self.node.exchange(own.plan.fits)), ""
        if not shared.plan.swapped:
            reason = "everything fits on each device" if all_fit else "with so few blocks it would save nothing"
        elif not shared.plan.fits and all_fit:
            reason = "the devices don't have enough memory for it, but with blocks from the computer's memory it fits"
        if reason:
            self.node = None
        return (own if reason else shared), reason

    def agreed(self, automatic: AutomaticMemory, made: SwapPlan | None) -> SwapPlan | None:
        """Take the first device's plan on all that share blocks, and return it. made: this one's."""
        if self.node is None:
            return made
        plain = self.node.exchange(None if made is None else made.plain())[0]
        if plain is None:
            return None
        automatic.adopt(SwapPlan.of(plain))
        return automatic.plan

    def check_built(self, holders: Sequence[Holder]) -> None:
        """Tell the others that the model is placed.

        Raises OutOfMemoryElsewhere where it is not on one of them, and frees what the holders hold.
        """
        if self.node is not None and any(self.node.exchange(False)):
            for holder in holders:
                holder.release(last=True)
            raise OutOfMemoryElsewhere

    def not_built(self, error: Exception) -> None:
        """Tell the others of an OOM while the model was placed, unless they have told of it."""
        if self.node is not None and not isinstance(error, OutOfMemoryElsewhere):
            self.node.exchange(True)

    def ask_for_less(self, error: Exception) -> None:
        """Have all go on with a smaller plan, unless another device has asked for it."""
        if self.ring is not None and not isinstance(error, OutOfMemoryElsewhere):
            self.ring.ask_for_less()

    def finish(self) -> None:
        """Take part in the others' forwards until all have ended theirs: behind each piece of work, on the device.

        Raises what interrupted this rank while the others counted on it.
        """
        if self.ring is not None:
            self.ring.end_work()
        self.world.raise_interrupted()

    def leave(self) -> None:
        """Leave the others, because of an error."""
        if self.ring is not None:
            self.ring.leave()

    def facts(self) -> dict[str, int]:
        """Return an entry for the summary: the number of devices that share the swapped blocks."""
        return {} if self.ring is None else {"blocks_shared_by": self.ring.peers.count}

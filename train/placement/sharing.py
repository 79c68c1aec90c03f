"""Sharing of blocks by the devices of a machine: one memory plan for all, and forwards run together."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...memory.swap.plan import SwapPlan, Way
from ...memory.swap.sharded import OutOfMemoryElsewhere, ShardedRing, ShardedSwap
from ...memory.swap.training import BlockSwap
from ...memory.weights.residency import Holder
from ..config.settings import MemoryOptions
from ..distributed.node import NodeRanks
from ..distributed.world import World
from .auto import AutomaticMemory, StepCost


class SharedBlocks:
    """Agreements of a run with the ranks that share its blocks, if there are any.

    node: those ranks; None without any.
    """

    def __init__(self, world: World, node: NodeRanks | None, device: torch.device):
        self.world = world
        self.node = node
        self.device = device
        self._swap: BlockSwap | None = None

    def use(self, swap: BlockSwap | None) -> None:
        """Set the run's block swap, whose ring the ranks fill together."""
        self._swap = swap

    @property
    def ring(self) -> ShardedRing | None:
        """The ring that all ranks fill together; None without sharing."""
        return self._swap.ring if isinstance(self._swap, ShardedSwap) else None

    def plan(
        self, options: MemoryOptions, measured: StepCost, order: tuple[str, ...], previous_choice: Way | None
    ) -> tuple[AutomaticMemory, str]:
        """Plan a run, see `AutomaticMemory`. Returns the plan, and why blocks are not shared; empty if they are.

        All ranks of a machine use the plan of the first one, which is made for the least free memory of them.
        """
        own_plan = AutomaticMemory(options, measured, order, previous_choice)
        if self.node is None:
            return own_plan, ""
        link, count = self.node.bandwidth(self.device), self.node.count
        reports = self.node.all_gather([measured.machine.free, measured.other_bytes])
        machine = replace(measured.machine, free=min(free for free, _ in reports), link=link, file=None, shards=count)
        cost = replace(measured, machine=machine, other_bytes=max(other for _, other in reports))
        common_plan = AutomaticMemory(options, cost, order, previous_choice)
        self.agreed(common_plan, common_plan.plan)
        all_fit, reason = all(self.node.all_gather(own_plan.plan.fits)), ""
        if not common_plan.plan.swapped:
            reason = "everything fits on each device" if all_fit else "with so few blocks it would save nothing"
        elif not common_plan.plan.fits and all_fit:
            reason = "the devices don't have enough memory for it, but with blocks from the computer's memory it fits"
        if reason:
            self.node = None
        return (own_plan if reason else common_plan), reason

    def agreed(self, automatic: AutomaticMemory, swap_plan: SwapPlan | None) -> SwapPlan | None:
        """Adopt the first rank's plan on all that share blocks, and return it. swap_plan: this rank's."""
        if self.node is None:
            return swap_plan
        plain = self.node.all_gather(None if swap_plan is None else swap_plan.plain())[0]
        if plain is None:
            return None
        automatic.adopt(SwapPlan.from_plain(plain))
        return automatic.plan

    def check_built(self, holders: Sequence[Holder]) -> None:
        """Report to the other ranks that the model is placed.

        Raises OutOfMemoryElsewhere if it is not on one of them, after releasing the holders.
        """
        if self.node is not None and any(self.node.all_gather(False)):
            for holder in holders:
                holder.release(last=True)
            raise OutOfMemoryElsewhere

    def not_built(self, error: Exception) -> None:
        """Report an OOM of placing the model to the other ranks, unless they have reported it."""
        if self.node is not None and not isinstance(error, OutOfMemoryElsewhere):
            self.node.all_gather(True)

    def ask_for_less(self, error: Exception) -> None:
        """Request a smaller plan for all ranks, unless another rank has requested it."""
        if self.ring is not None and not isinstance(error, OutOfMemoryElsewhere):
            self.ring.ask_for_less()

    def finish(self) -> None:
        """Take part in the other ranks' forwards until all have ended. Call it after each piece of work on the device.

        Raises the error that interrupted this rank while the others depended on it.
        """
        if self.ring is not None:
            self.ring.end_work()
        self.world.interrupts.raise_pending()

    def abort(self) -> None:
        """Let the other ranks begin no further forward, because of an error of this one."""
        if self.ring is not None:
            self.ring.abort()

    def facts(self) -> dict[str, int]:
        """Return an entry for the summary: the number of devices that share the swapped blocks."""
        return {} if self.ring is None else {"blocks_shared_by": self.ring.peers.count}

"""Memory options of a run: the user's, with values of the automatic plan for those that are left to it."""

from collections.abc import Mapping

import psutil

from ..distributed.node import connect_node, free_host_memory
from ..preflight.context import RunContext
from ..report.observer import Observer
from . import auto
from .auto import AutomaticMemory
from .sharing import SharedBlocks


class MemoryChoice:
    """Choice of the memory options, from the measured cost of a step and from the OOMs of the run.

    options: the options now.
    automatic: the plan; None if the user has chosen all options.
    sharing: agreements with the ranks that share the blocks.
    free_before: free bytes of the host's memory before the model took any.
    """

    def __init__(self, context: RunContext, observer: Observer):
        self.user_options = self.options = context.device_settings.memory
        self.observer, self.world = observer, context.world
        self.free_before = free_host_memory(self.world)
        device = context.patcher.load_device
        self.sharing = SharedBlocks(self.world, connect_node(self.world, device, self.options), device)
        self.automatic: AutomaticMemory | None = None

    def plan(self, context: RunContext) -> None:
        """Measure one step and choose the fastest plan that fits, if options are left to the plan."""
        if not auto.plans_memory(self.options):
            return
        self.observer.phase("Measuring one step")
        measured = auto.measure(
            context.patcher,
            context.family,
            context.all_data,
            context.targets,
            context.device_settings,
            context.compile_settings,
            self.free_before,
            self.world.local_size,
        )
        previous_choice = auto.chosen_before(context.environment, self.user_options)
        self.automatic, reason = self.sharing.plan(
            self.user_options, measured, context.family.forward.swap_order, previous_choice
        )
        if reason:
            self.observer.note(f"shard is not used: {reason}.")
        self.options = self.automatic.options()
        self.observer.note(self.automatic.plan.text)

    def host_memory(self) -> int:
        """Return the bytes of the host's memory that this process may use for swapped blocks."""
        free = psutil.virtual_memory().available if self.world.world_size == 1 else self.free_before
        return free // self.world.local_size

    def step_down(self, step: int, error: Exception | None = None) -> bool:
        """Switch to the next smaller plan and report it. Returns False without an automatic plan or a smaller one.

        step: optimizer steps done.
        error: the OOM of a forward or backward, here or on a device that shares blocks; None while the model is placed.
        """
        if self.automatic is None:
            return False
        if error is not None:
            self.sharing.ask_for_less(error)
        smaller_plan = self.sharing.agreed(self.automatic, self.automatic.step_down())
        if smaller_plan is None:
            return False
        self.options = self.automatic.options()
        self.observer.note(f"Out of memory at step {step + 1}, so training continues with less. {smaller_plan.text}")
        return True

    def plan_again(self, forward: Mapping[str, float], steps: int, compile_seconds: float) -> bool:
        """Plan with the seconds of the compiled blocks: the plan was made with eager ones, which are slower.

        The arguments are those of `AutomaticMemory.plan_again`. Returns whether another plan is to be placed.
        """
        if self.automatic is None or not self.automatic.may_plan_again:
            return False
        if not self.automatic.plan_again(forward, steps, compile_seconds):
            return False
        self.options = self.automatic.options()
        self.observer.note(f"Replanned with the measured speed of the compiled blocks. {self.automatic.plan.text}")
        return True

    def choice_facts(self) -> dict[str, str]:
        """Return the checkpointing and its budget if the plan chose them: a resumed run takes them again."""
        return auto.choice_facts(self.options) if self.user_options.checkpointing == "auto" else {}

    def plan_text(self) -> str | None:
        """Return the memory plan in words; None without one."""
        return self.automatic.plan.text if self.automatic else None

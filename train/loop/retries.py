"""Retries of a step: by a smaller memory plan after an OOM, without torch.compile after a compile error."""

from collections.abc import Callable
from typing import TypeVar

import comfy.model_management

from ...compile.region import CompileFailed, cannot_compile
from ..config.environment import environment_facts
from ..placement.placed_model import PlacedModel
from ..report import errors
from ..report.observer import Observer
from ..step.batches import StepBatches
from ..step.clock import StepClock
from .learner import Learner
from .progress import Progress

T = TypeVar("T")


class StepRetries:
    """Retries of forwards and backwards that fail. Repeating is exact, as random numbers depend on the step only.

    environment: facts that the last bits of a result depend on, for states.
    """

    def __init__(
        self,
        observer: Observer,
        placed: PlacedModel,
        learner: Learner,
        batches: StepBatches,
        clock: StepClock,
        progress: Progress,
    ) -> None:
        self.observer = observer
        self.placed = placed
        self.learner = learner
        self.batches = batches
        self.clock = clock
        self.progress = progress
        self.environment = self._environment()

    def attempt(self, compute: Callable[[], T]) -> T:
        """Run `compute`; on OOM retry with the next smaller memory plan, on a compile error retry eagerly.

        Raises the error if neither applies or no smaller plan is left.
        """
        try:
            result = compute()
            self._note_uncompiled()
            return result
        except Exception as error:
            smaller = comfy.model_management.is_oom(error) and self.placed.memory.step_down(self.progress.step, error)
            is_requested = isinstance(error, CompileFailed)  # by fullgraph on Compile Model
            compiles = self.placed.execution.runner.planned_graphs and not smaller and not is_requested
            cause = cannot_compile(error) if compiles else None
            if cause is None and not smaller:
                raise
            errors.log_error("A step failed and is tried again", error)
        # Retry outside the handler: inside it the exception's frames still hold the failed step's activations.
        if cause is None:
            self.place_again()
            return self.attempt(compute)
        self.placed.execution.runner.checkpointing.discard_offloaded()
        self.fall_back_to_eager(cause)
        comfy.model_management.soft_empty_cache()
        return compute()

    def place_again(self) -> None:
        """Place the model by another memory plan, between two steps or before a retry."""
        self.learner.zero_grad()
        self.batches.drop_ahead()
        self.placed.rebuild(self.progress.step)
        self.environment = self._environment()
        self.clock.clear()  # the pace was that of the previous plan

    def fall_back_to_eager(self, cause: str) -> None:
        """Switch to eager execution for the rest of the run and report `cause` once."""
        self.observer.note(f"Compiling failed, so training runs uncompiled: {cause}")
        self.placed.execution.fall_back_to_eager()
        self.environment = self._environment()

    def close(self) -> None:
        """Release the model and the LoRA."""
        del self.placed, self.learner

    def _note_uncompiled(self) -> None:
        """Report the block types that failed to compile and run uncompiled; if all did, train uncompiled."""
        runner = self.placed.execution.runner
        failed = dict(runner.failed)
        runner.failed.clear()
        if failed and not runner.planned_graphs:
            self.fall_back_to_eager(next(iter(failed.values())))
            return
        for label, cause in failed.items():
            self.observer.note(f"{label} blocks can't be compiled, so they run uncompiled: {cause}")

    def _environment(self) -> dict[str, str]:
        world_size = self.placed.world.world_size
        devices = {} if world_size == 1 else {"devices": str(world_size)}
        compile_settings = self.placed.execution.compile_settings
        return (
            environment_facts(self.placed.weights.device, compile_settings)
            | self.placed.memory.choice_facts()
            | devices
        )

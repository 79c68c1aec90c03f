"""Timed steps of a sampler, each compiled or eager."""

from collections.abc import Callable, Sequence
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ...memory.comfy_compiler import without_comfy_compiler
from ..attach import KEY
from ..compiled_model import CompiledModel
from ..report.timing import synchronise
from .inputs import StepInputs

STAND = "tessera.tune"
WARM_UP = 2  # minimum number of steps: with scope stack the first one only records the blocks' wiring
MOST_WARM_UP = 8


def uncompiled(patcher: ModelPatcher) -> ModelPatcher:
    clone = patcher.clone()
    clone.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    clone.remove_callbacks_with_key(CallbacksMP.ON_PRE_RUN, KEY)
    clone.remove_attachments(KEY)
    return clone


class Bench:
    """Clone of the MODEL that runs each sampling step compiled or eager, as requested, and times it.

    It replaces Compile Model's own wrapper, and the steps are those of a sampler, so that the time covers the
    whole step.
    """

    def __init__(
        self, clone: ModelPatcher, compiled_model: CompiledModel | None, inputs: StepInputs, clock: Callable[[], float]
    ) -> None:
        self.clone = clone
        self.compiled_model = compiled_model
        self.inputs = inputs
        self.clock = clock
        self._turns: list[bool] = []
        self._timed_steps: list[tuple[bool, float]] = []
        self._compiled = False
        if compiled_model is not None:
            clone.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
            clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, self._denoise)
        clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, STAND, self._step)

    def run(self, turns: Sequence[bool]) -> list[tuple[bool, float]]:
        """Sample one step for each turn, True for compiled. Returns turns and their seconds."""
        self._turns, self._timed_steps = list(turns), []
        with torch.inference_mode():
            self.inputs.sample(self.clone, len(turns))
        if len(self._timed_steps) != len(turns):
            raise RuntimeError("another node leaves out or repeats steps of the sampler, so they can't be compared.")
        return self._timed_steps

    def warm_up(self) -> list[float] | None:
        """Run compiled steps until one needs no compile.

        Returns the seconds of those that compiled and of the last one; None if the compiles do not end.
        """
        assert self.compiled_model is not None
        compiling = []
        for number in range(1, MOST_WARM_UP + 1):
            counts_before = _state(self.compiled_model)
            ((_, seconds),) = self.run([True])
            counts_after = _state(self.compiled_model)
            if counts_after[0] != counts_before[0]:
                compiling.append(seconds)
            if counts_after == counts_before and number >= WARM_UP:
                return [*compiling, seconds]
        return None

    def _step(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        comfy.model_management.throw_exception_if_processing_interrupted()
        self._compiled = len(self._timed_steps) < len(self._turns) and self._turns[len(self._timed_steps)]
        synchronise(self.clone.load_device)
        started = self.clock()
        out = executor(*args, **kwargs)
        synchronise(self.clone.load_device)
        self._timed_steps.append((self._compiled, self.clock() - started))
        return out

    def _denoise(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.compiled_model is not None
        if self._compiled:
            return self.compiled_model.apply_model(executor, *args, **kwargs)
        # As for the compiled steps in between, whose allocations would otherwise differ from the recorded ones.
        with without_comfy_compiler(args, kwargs):
            return executor(*args, **kwargs)


def _state(compiled_model: CompiledModel) -> tuple[int, int]:
    """Count (compiles, timings) of its regions: a region times itself once after each compile."""
    reports = [region.report for region in compiled_model.regions.values()]
    return sum(len(report.events) for report in reports), sum(len(report.speeds) for report in reports)

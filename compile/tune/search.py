"""Search for the settings of Compile Model that are fastest for a model, a size and this machine, by measuring them."""

import gc
import logging
import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ...common.core import end_of_node
from ...memory.swap.patcher import SwapPatcher
from ...models.blocks import BlockOfModel, block_lists, find_blocks
from ..attach import KEY, compile_model, compiled_model_of
from ..compiled_model import CompiledModel, forget_compiled_model
from ..cuda_graphs import no_cuda_graphs
from ..region import first_line
from ..report.timing import memory_beside_tensors
from ..settings import CompileSettings
from .bench import WARM_UP, Bench, uncompiled
from .inputs import StepInputs
from .results import MeasuredSettings, Quartiles, TuneResult, UnmeasuredSettings, label, result_key

log = logging.getLogger(__name__)

PAIRS = (3, 9)  # minimum and maximum, as the time allows
AUTOTUNE = 3.0  # compile time with max-autotune, which benchmarks kernels, over compile time without

OnProgress = Callable[[int, str], None]


def candidates(device: torch.device) -> list[CompileSettings]:
    """List the settings worth trying, those with the most gain for their compile time first.

    Sizes other than the tuned one have to work as well, so dynamic stays auto.
    """
    choices = [("blocks", "default"), ("stack", "default"), ("model", "default")]
    if device.type == "cuda":
        choices = [
            ("blocks", "default"),
            ("blocks", "max-autotune-no-cudagraphs"),
            ("stack", "default"),
            ("stack", "max-autotune-no-cudagraphs"),
            ("model", "default"),
            ("blocks", "reduce-overhead"),
            ("model", "reduce-overhead"),
        ]
    return [CompileSettings(scope=scope, mode=mode) for scope, mode in choices]


def tune(
    patcher: ModelPatcher,
    inputs: StepInputs,
    time_budget: float,
    trials: Sequence[CompileSettings],
    on_progress: OnProgress,
    clock: Callable[[], float] = time.perf_counter,
) -> TuneResult:
    """Measure eager and each of `trials` on steps of the MODEL, which is left unchanged.

    The graphs of the best settings stay with it, for the next `compile_model`.

    time_budget: seconds; candidates that are not expected to fit are skipped.
    on_progress: called with the number of the candidate that is measured, 0 for eager, and a text that names it.
    Raises ValueError if the model can't run at all, and lets ComfyUI's interrupt through.
    """
    run = _Run(patcher, inputs, time_budget, clock)
    try:
        on_progress(0, "Measuring eager")
        run.measure_eager()
        for number, settings in enumerate(trials, 1):
            if (reason := run.why_not(settings)) is not None:
                run.unmeasured.append(UnmeasuredSettings(settings, reason, failed=False))
                continue
            on_progress(number, f"Measuring {label(settings)} ({number} of {len(trials)})")
            run.measure(settings)
        result = run.result()
        best = result.best()
        run.clear(keep=None if best is None else best.settings)
        return result
    except BaseException:
        run.clear(keep=None)
        raise


def tuned_model(patcher: ModelPatcher, result: TuneResult) -> ModelPatcher:
    """Compile the MODEL with the best settings, or return it uncompiled if none is faster than eager."""
    if (best := result.best()) is not None:
        return compile_model(patcher, best.settings)[0]
    return patcher if compiled_model_of(patcher) is None else uncompiled(patcher)


class _Run:
    """State of one tuning."""

    def __init__(self, patcher: ModelPatcher, inputs: StepInputs, time_budget: float, clock: Callable[[], float]):
        self.patcher = patcher
        self.inputs = inputs
        self.clock = clock
        self.time_budget, self.ends = time_budget, clock() + time_budget
        self.measured: list[MeasuredSettings] = []
        self.unmeasured: list[UnmeasuredSettings] = []
        self.compiled_models: list[CompiledModel] = []
        self.compile_seconds: list[tuple[CompileSettings, float]] = []
        self.eager_steps: list[float] = []
        model = patcher.get_model_object("diffusion_model")
        self.blocks = find_blocks(model)
        self.lists = block_lists(model, self.blocks)

    def measure_eager(self) -> None:
        """Measure the MODEL without a Compile Model in front of it."""
        bench = Bench(uncompiled(self.patcher), None, self.inputs, self.clock)
        try:
            bench.run([False])
            self.eager_steps = [seconds for _, seconds in bench.run([False] * PAIRS[0])]
        except Exception as error:
            if comfy.model_management.is_oom(error) or self.inputs.prompt:
                raise
            raise ValueError(
                f"model: Tune Compile could not make inputs that {type(self.patcher.model).__name__} takes "
                f"({first_line(error)}); connect a prompt for it to positive."
            ) from error
        finally:
            end_of_node()

    def why_not(self, settings: CompileSettings) -> str | None:
        """Return the reason these settings are not tried, as a sentence; None if they are."""
        if settings.scope != "model" and not self.blocks:
            return "the model has no repeated blocks."
        if settings.scope == "stack" and not self.lists:
            return "the model has no stack of blocks only, so this is the same as scope blocks."
        if isinstance(self.patcher, SwapPatcher) and (settings.scope != "blocks" or settings.options().cuda_graphs()):
            return "some blocks stream from RAM (block swap), so it's block by block without CUDA graphs anyway."
        if settings.options().cuda_graphs() and (reason := no_cuda_graphs(self.patcher.load_device)) is not None:
            return f"{reason}."
        remaining = self.ends - self.clock()
        expected = self.expected_seconds(settings)
        if expected > remaining:
            return (
                f"it would take about {expected:.0f} s and {max(0, remaining):.0f} s of the time budget are left; "
                "raise time_budget to try it."
            )
        return None

    def expected_seconds(self, settings: CompileSettings) -> float:
        """Estimate the time of compiling, from the compiles so far, and of the minimum number of steps."""
        steps = (WARM_UP + 1 + 2 * PAIRS[0]) * Quartiles.from_values(self.eager_steps).median
        work = self._work(settings)
        return steps + max((s * work / self._work(earlier) for earlier, s in self.compile_seconds), default=0.0)

    def _work(self, settings: CompileSettings) -> float:
        """Estimate the work of compiling, without a unit.

        It grows slower than the number of blocks in a region, since equal kernels are built once.
        """

        def kinds(blocks: list[BlockOfModel]) -> int:
            return len({block.kind for block in blocks})

        in_lists = {block.name for blocks in self.lists.values() for block in blocks}
        if settings.scope == "model":
            size = float(len(self.blocks))
        elif settings.scope == "stack":
            size = len(in_lists) + kinds([block for block in self.blocks if block.name not in in_lists])
        else:
            size = kinds(self.blocks)
        return math.sqrt(max(1.0, size)) * (AUTOTUNE if "max-autotune" in settings.mode else 1.0)

    def measure(self, settings: CompileSettings) -> None:
        """Add a row for these settings. An error becomes a row too, and does not end the tuning."""
        try:
            row = self._measure(settings)
        except Exception as error:
            log.debug("%s", label(settings), exc_info=error)
            oom = comfy.model_management.is_oom(error)
            row = UnmeasuredSettings(settings, "out of memory." if oom else first_line(error), failed=True)
            comfy.model_management.soft_empty_cache()
        finally:
            end_of_node()
        if isinstance(row, MeasuredSettings):
            self.measured.append(row)
        else:
            self.unmeasured.append(row)

    def _measure(self, settings: CompileSettings) -> MeasuredSettings | UnmeasuredSettings:
        clone, compiled_model = compile_model(self.patcher, settings)
        compiled_before = compiled_model.report().counts().seconds if compiled_model.regions else None
        if compiled_before is None:
            self.compiled_models.append(compiled_model)
        if not clone.get_wrappers(WrappersMP.APPLY_MODEL, KEY):
            return UnmeasuredSettings(settings, compiled_model.notes[-1], failed=True)
        device = clone.load_device
        bench = Bench(clone, compiled_model, self.inputs, self.clock)
        if clone.model is not self.patcher.model:  # loaded once more, without dynamic VRAM
            bench.run([False])
        memory = _memory_in_use(device)
        warm_up = bench.warm_up()
        if (reason := _not_compiled(compiled_model)) is not None:
            return UnmeasuredSettings(settings, reason, failed=True)
        if warm_up is None:
            return UnmeasuredSettings(settings, _compiles_on(compiled_model), failed=True)
        *compiling, last = warm_up
        compiled, eager = self._pairs(bench, last)
        step = Quartiles.from_values(compiled)
        seconds = sum(max(0.0, s - step.median) for s in compiling) if compiled_before is None else compiled_before
        self.compile_seconds.append((settings, seconds))
        if not self.patcher.is_dynamic():
            self.eager_steps += eager
        return MeasuredSettings(
            settings,
            _times(step, 1000),
            Quartiles.from_values([e / c for e, c in zip(eager, compiled, strict=True)]),
            round(seconds, 2),
            max(0, _memory_in_use(device) - memory) // 2**20,
            compiled_model.report().counts().graphs,
            tuple(compiled_model.notes),
        )

    def _pairs(self, bench: Bench, compiled_step: float) -> tuple[list[float], list[float]]:
        """Time compiled and eager steps alternately, for about a tenth of the budget; return their seconds."""
        pair = compiled_step + Quartiles.from_values(self.eager_steps).median
        pairs = round(0.1 * self.time_budget / pair) if pair > 0 else PAIRS[1]
        timed = bench.run([True, False] * min(PAIRS[1], max(PAIRS[0], pairs)))
        return [s for compiled, s in timed if compiled], [s for compiled, s in timed if not compiled]

    def result(self) -> TuneResult:
        return TuneResult(
            result_key(self.patcher, self.inputs),
            _times(Quartiles.from_values(self.eager_steps), 1000),
            tuple(self.measured),
            tuple(self.unmeasured),
            self.time_budget,
            datetime.now().strftime("%Y-%m-%d %H:%M"),
        )

    def clear(self, keep: CompileSettings | None) -> None:
        """Free the graphs of all settings compiled here, except those to keep."""
        self._forget(keep)
        gc.collect()
        comfy.model_management.soft_empty_cache()

    def _forget(self, keep: CompileSettings | None) -> None:
        for compiled_model in self.compiled_models:
            if compiled_model.settings != keep:
                forget_compiled_model(compiled_model)
        self.compiled_models.clear()


def _memory_in_use(device: torch.device) -> int:
    """Return the bytes in use, without torch's cached blocks."""
    gc.collect()
    comfy.model_management.soft_empty_cache()
    tensors = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    return memory_beside_tensors(device) + tensors


def _not_compiled(compiled_model: CompiledModel) -> str | None:
    """Return the reason no part of it runs compiled, as a sentence; None if some part does."""
    if any(not region.eager and region.report.compiled_calls for region in compiled_model.regions.values()):
        return None
    causes = [
        note for region in compiled_model.regions.values() for note in region.report.notes
    ] or compiled_model.notes
    return causes[-1] if causes else "nothing of the model was compiled."


def _compiles_on(compiled_model: CompiledModel) -> str:
    causes = [cause for region in compiled_model.regions.values() for cause in region.report.recompiles()]
    return f"it compiles again at every step: {causes[-1] if causes else 'torch does not say why.'}"


def _times(spread: Quartiles, factor: float) -> Quartiles:
    return Quartiles(*(round(factor * value, 3) for value in (spread.low, spread.median, spread.high)))

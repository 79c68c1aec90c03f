"""Disk space check: the least that one or two runs will write, compared with the free space before training."""

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...lora.options import NetworkOptions
from ...lora.plan import adapter_specs, parameter_count
from ...models.convolutions import layer_shapes
from ..config.settings import TrainSettings
from ..objective.batch import strata_sizes
from ..objective.timestep_sampling import Strata
from ..runs.run_folder import STATES_KEPT, RunFolder
from .checks import CheckedRun
from .run_start import RunStart


@dataclass(frozen=True)
class DiskSpace:
    """Least disk space of a run: one LoRA and some states.

    lora: bytes of a LoRA.
    state: bytes of a state.
    count: largest number of additional states at any moment; a new state is written before the oldest is deleted.
    final_count: number of additional states at the end.
    """

    lora: int
    state: int
    count: int
    final_count: int

    @property
    def peak_bytes(self) -> int:
        """Bytes needed at the peak."""
        return self.lora + self.count * self.state

    @property
    def final_bytes(self) -> int:
        """Bytes occupied at the end."""
        return self.lora + self.final_count * self.state

    def __str__(self) -> str:
        states = f"a state of {_size(self.state)}" if self.count == 1 else f"{self.count} states of {_size(self.state)}"
        return f"a LoRA of {_size(self.lora)} and {states}{'' if self.count == 1 else ' each'}"


def trained_parameters(model: Any, network: NetworkOptions, targets: Sequence[str]) -> int:
    """Count the trained parameters of a LoRA on these layers of a model."""
    shapes = layer_shapes(model)
    return sum(parameter_count(spec, shapes[name]) for name, spec in adapter_specs(network, targets).items())


def required_space(checked: CheckedRun, settings: TrainSettings, run_start: RunStart) -> DiskSpace:
    """Compute the disk space of a run from its first step or the state it resumes from."""
    numbers = trained_parameters(checked.patcher.model, settings.network, checked.targets)
    average = 4 if settings.optimizer.ema_decay else 0
    resumed_from = run_start.state if settings.names_state else None
    present_states = min(STATES_KEPT, len(run_start.folder.states_except(resumed_from)))
    strata = strata_sizes(settings.samples_per_step, checked.data.samples)
    saves = max(1, remaining_saves(settings, strata, run_start.step))
    return DiskSpace(
        lora=4 * numbers,
        state=(4 + settings.optimizer.spec.least_state_bytes + average) * numbers,
        count=min(saves, STATES_KEPT + 1 - present_states),
        final_count=min(saves, STATES_KEPT - present_states),
    )


def check_disk_space(folder: RunFolder, need: DiskSpace) -> None:
    """Raise ValueError if the disk has less free space than the run needs."""
    free = free_space(folder.path)
    if free is not None and free < need.peak_bytes:
        raise ValueError(
            f"output_name: the disk with the output folder has only {_size(free)} free, but this run writes at least "
            f"{_size(need.peak_bytes)} ({need}); free some space, or lower rank."
        )


def check_disk_space_of_pair(folder: RunFolder, first: DiskSpace, second: DiskSpace) -> None:
    """Raise ValueError if the disk cannot hold two runs, the second of which starts after the first has ended.

    Both write to the same disk; `folder` is the folder of one of them.
    """
    free, needed = free_space(folder.path), max(first.peak_bytes, first.final_bytes + second.peak_bytes)
    if free is not None and free < needed:
        raise ValueError(
            f"output_name: the disk with the output folder has only {_size(free)} free, but the runs of the two "
            f"experts write at least {_size(needed)} ({first}, then {second}); free some space, or lower rank."
        )


def remaining_saves(settings: TrainSettings, strata: Strata, step: int) -> int:
    """Count the saves of a run after `step`, the final one included."""
    last_step, per_step = max(step, settings.steps - 1), 1
    interval = settings.save_every
    if settings.save_every_epochs:
        interval, per_step = strata.epoch * settings.save_every_epochs, strata.step
    return 1 + (last_step * per_step // interval - step * per_step // interval if interval else 0)


def free_space(folder: Path) -> int | None:
    """Return the free bytes of the disk of `folder`, which need not exist yet; None if they are unknown."""
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
        return usage.free if usage.total else None
    return None


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"

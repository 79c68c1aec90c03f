"""Whether the disk has room for what a run writes at least, before it trains."""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..models.family import linear_shapes
from .network_plan import adapter_specs, trained_numbers
from .objective import Strata
from .run import STATES_KEPT, RunFolder, TrainSettings

# Bytes of state that each optimizer keeps of a trained number whatever its arguments. Of factors, whose size depends on
# the rank, and of an optimizer that we don't know, nothing is counted.
_SURELY_KEPT = {"adamw": 8, "adamw8bit": 2, "prodigy": 8, "adafactor": 0, "came": 4, "adamw_schedulefree": 8}
_SURELY_KEPT |= {"lion": 4, "muon": 4, "custom": 0}


def check_room(
    folder: RunFolder, settings: TrainSettings, model: Any, targets: Sequence[str], strata: Strata, step: int
) -> None:
    """Raises ValueError where the disk has less room than one LoRA and the states that lie there at once: the newest
    ones, and that which is written beside them. step: where the run begins."""
    shapes = linear_shapes(model)
    numbers = sum(trained_numbers(s, shapes[name]) for name, s in adapter_specs(settings.network, targets).items())
    average = 4 if settings.optimizer.ema_decay else 0
    lora, state = 4 * numbers, (4 + _SURELY_KEPT[settings.optimizer.optimizer] + average) * numbers
    there = min(STATES_KEPT, len(folder.states()))
    count = max(1, min(saves_to_come(settings, strata, step), STATES_KEPT + 1 - there))
    free = _free(folder.path)
    if free is not None and free < lora + count * state:
        states = f"a state of {_size(state)}" if count == 1 else f"{count} states of {_size(state)} each"
        raise ValueError(
            f"output_name: the disk that the run is saved on has {_size(free)} free, and the run writes at least "
            f"{_size(lora + count * state)} (a LoRA of {_size(lora)} and {states}); free some space, or lower rank."
        )


def saves_to_come(settings: TrainSettings, strata: Strata, step: int) -> int:
    """How often a run saves after `step`, with the last time."""
    before, shown = max(step, settings.steps - 1), 1
    every = settings.save_every
    if settings.save_every_epochs:
        every, shown = strata.epoch * settings.save_every_epochs, strata.step
    return 1 + (before * shown // every - step * shown // every if every else 0)


def _free(folder: Path) -> int | None:
    """Bytes that may be written below `folder`, which need not be there yet; None where the disk does not say."""
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
        return usage.free if usage.total else None
    return None


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"

"""Post-hoc averaging of the LoRAs that a run saved.

An exact average needs the weights of every step, or running averages kept during training (Karras et al. 2023, arXiv
2312.02696, section 3, rebuilds any profile from two of them). Here each saved LoRA represents the steps since the
previous one: exact with a save at every step, an approximation with fewer.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from ...common.files import read_tensors
from ...common.text import quoted
from ...common.untrusted.tensor_files import metadata_field, open_tensors
from ...lora.files.lora_model import LoraModel
from ..optim.averaging import decay_at
from ..runs.run_names import STEPS, step_loras

EXPONENTIAL = "exponential"
POWER = "power"
EQUAL = "equal"
PROFILES = (EXPONENTIAL, POWER, EQUAL)
WIDEST = 0.28  # the relative width of a power profile with gamma = 0, an equal mean, is 1 / sqrt(12)
AVERAGE = "tessera_average"


@dataclass(frozen=True)
class Snapshot:
    """LoRA file of a run.

    step: optimizer steps it was trained for.
    path: its file.
    """

    step: int
    path: Path


@dataclass(frozen=True)
class Profile:
    """Averaging profile: the weight of each step.

    kind: one of PROFILES.
    decay: decay per step, above 0 and below 1; exponential only.
    width: relative width, above 0 and up to WIDEST; power only.
    last_part: fraction of the steps to average, counted from the end.
    """

    kind: str = EXPONENTIAL
    decay: float = 0.999
    width: float = 0.1
    last_part: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in PROFILES:
            raise ValueError(f"profile is {quoted(self.kind)}; choose one of {', '.join(PROFILES)}.")
        if not 0 < self.decay < 1:
            raise ValueError(f"decay is {self.decay}; set it above 0 and below 1 (0.999 is usual).")
        if not 0 < self.width <= WIDEST:
            raise ValueError(f"width is {self.width}; set it above 0 and to {WIDEST} at most.")
        if not 0 < self.last_part <= 1:
            raise ValueError(f"last_part is {self.last_part}; set it above 0 and to 1 (all steps) at most.")


def list_runs(root: Path) -> list[str]:
    """List the run folders below the LoRA folder that hold at least two LoRAs, relative to it."""
    folders = sorted({path.parent.parent for path in root.rglob(f"*{STEPS}/*-step*.safetensors")})
    return [folder.relative_to(root).as_posix() for folder in folders if len(snapshots(folder)) > 1]


def snapshots(folder: Path) -> list[Snapshot]:
    """List the LoRAs of the run in this folder by step."""
    steps = max((path.name for path in folder.glob(f"*{STEPS}") if path.is_dir()), default=None)
    if steps is None:
        return []
    name = steps.removesuffix(STEPS)
    loras = step_loras(folder, name)
    final = folder / f"{name}.safetensors"
    if (step := _steps_of(final)) is not None:
        loras.setdefault(step, final)
    return [Snapshot(step, path) for step, path in sorted(loras.items())]


def _steps_of(path: Path) -> int | None:
    """Read the number of steps from a LoRA's metadata; None if it is not ours or cannot be read."""
    try:
        with open_tensors(path) as file:
            return int((file.metadata() or {})["ss_steps"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def find_snapshots(root: Path, run: str, profile: Profile) -> tuple[list[Snapshot], int]:
    """Return the LoRAs that the profile averages, and the step of the LoRA before them (0 without one).

    Raises ValueError if the run is not below the LoRA folder, or fewer than two LoRAs are left.
    """
    folder = (root / run).resolve()
    available = snapshots(folder) if folder.is_relative_to(root.resolve()) else []
    if not available:
        raise ValueError(
            f"run: there is no run {quoted(run)} with saved LoRAs; choose one of the list (press R to renew it)."
        )
    begin = (1.0 - profile.last_part) * available[-1].step
    counted = [snapshot for snapshot in available if snapshot.step > begin]
    if len(counted) < 2:
        raise ValueError(
            f"run: the last_part {profile.last_part:g} of the steps of {quoted(run)} holds {len(counted)} of its "
            f"{len(available)} saved LoRAs, and an average takes two or more; raise last_part, or train with a smaller "
            "save_every and keep_last 0."
        )
    previous_step = available[-len(counted) - 1].step if len(counted) < len(available) else 0
    return counted, previous_step


def weights_of(steps: Sequence[int], profile: Profile, previous_step: int = 0) -> list[float]:
    """Compute the weight of the LoRA after each of these steps; the weights add up to 1.

    previous_step: step of the last LoRA before the first of them, 0 without one.

    exponential: ema ← D·ema + (1 − D)·LoRA from the first LoRA on. D is the product of the live average's decays
    d(t) = min(decay, (1 + t) / (10 + t)) over the steps t since the previous LoRA (`LoraAverage`).
    power: each LoRA is weighted by t^gamma over the steps that it represents, hence t_i^(gamma + 1) −
    t_(i−1)^(gamma + 1) (Karras et al. 2023, arXiv 2312.02696, section 3.1). gamma follows from the profile's relative
    width, see `gamma_of`.
    equal: the same weight for all.
    """
    if profile.kind == EXPONENTIAL:
        weights = [1.0]
        for last, step in pairwise(steps):
            decay = float(np.prod([decay_at(t, profile.decay) for t in range(last + 1, step + 1)]))
            weights = [*(weight * decay for weight in weights), 1.0 - decay]
        return weights
    if profile.kind == POWER:
        ends = np.array([previous_step, *steps], dtype=np.float64) / steps[-1]
        parts = np.diff(ends ** (gamma_of(profile.width) + 1.0))
        return [float(part) for part in parts / parts.sum()]
    return [1.0 / len(steps)] * len(steps)


def gamma_of(width: float) -> float:
    """Solve for gamma of the power profile whose standard deviation is `width` of the training time.

    Positive root of width = sqrt(gamma + 1) / ((gamma + 2)·sqrt(gamma + 3)) (arXiv 2312.02696, appendix C).
    """
    t = width**-2
    return float(np.roots([1.0, 7.0, 16.0 - t, 12.0 - t]).real.max())


def average(root: Path, run: str, profile: Profile) -> tuple[LoraModel, str]:
    """Average a run's saved LoRAs. Returns the LoRA and a report with one line per file.

    The tensors of the files are averaged, down and up separately, as the live EMA does. The delta W of the result is
    therefore not the mean of the deltas. Sums are fp64, the result is fp32.

    Raises ValueError if the files have different shapes or cannot be read.
    """
    counted, previous_step = find_snapshots(root, run, profile)
    weights = weights_of([snapshot.step for snapshot in counted], profile, previous_step)
    sums: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for snapshot, weight in zip(counted, weights, strict=True):
        try:
            tensors, metadata = read_tensors(snapshot.path)
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"run: {snapshot.path.name} can't be read ({error}); take it out of its folder."
            ) from error
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if sums and shapes != {name: tensor.shape for name, tensor in sums.items()}:
            raise ValueError(
                f"run: {snapshot.path.name} has other layers or another rank than the LoRAs before it; keep the LoRAs "
                "of one run in one folder."
            )
        for name, tensor in tensors.items():
            part = tensor.double() * weight
            sums[name] = sums[name] + part if name in sums else part
    facts = {"profile": profile.kind, "steps": [snapshot.step for snapshot in counted], "weights": weights}
    metadata[AVERAGE] = json.dumps(facts)
    text = "\n".join([_heading(counted, profile), *_lines(counted, weights), *_notes(metadata, profile)])
    return LoraModel.from_file({name: tensor.to(torch.float32) for name, tensor in sums.items()}, metadata), text


def _heading(counted: Sequence[Snapshot], profile: Profile) -> str:
    description = {
        EXPONENTIAL: f"exponential, decay {profile.decay:g} per step",
        POWER: f"power function, relative width {profile.width:g} (gamma {gamma_of(profile.width):.4g})",
        EQUAL: "equal",
    }[profile.kind]
    return f"The average of {len(counted)} saved LoRAs ({description}):"


def _lines(counted: Sequence[Snapshot], weights: Sequence[float]) -> list[str]:
    return [
        f"{snapshot.path.name}: step {snapshot.step}, {weight:.2%}"
        for snapshot, weight in zip(counted, weights, strict=True)
    ]


def _notes(metadata: dict[str, str], profile: Profile) -> list[str]:
    try:
        optimizer = metadata_field(metadata, "tessera")["optimizer"]
    except (KeyError, TypeError, ValueError):
        optimizer = {}
    notes = []
    if optimizer.get("ema_decay"):
        notes.append(f"These LoRAs are averages already (ema_decay {optimizer['ema_decay']:g}).")
    if optimizer.get("optimizer") == "adamw_schedulefree":
        notes.append("These LoRAs are averages already, of the schedule-free optimizer.")
    return notes

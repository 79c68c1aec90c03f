"""A run's whole state in one file: LoRA masters, optimizer, schedule, data position, losses.

The container is safetensors under a name of its own (`.tessera`), so that no LoRA loader lists it. Nothing is pickled.
Random numbers need no state: every draw is a function of (seed, purpose, step, sample).
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from ...common.files import read_tensors, write_atomically
from ..optim.state_dict import pack_state, unpack_state

STATE_SUFFIX = ".tessera"
MASTERS = "masters."
_FORMAT = 1
# Plain fields that a state may lack.
_LATER = ("validation", "adapters", "parts")


@dataclass(frozen=True)
class TrainingState:
    """step: optimizer steps done. batches: batches drawn. machine: what bits may depend on. lineage: what the run is,
    apart from its length. average: the LoRA's moving average, empty where the run keeps none. validation: the points
    so far (`validation.Validation`) and the name of what they were measured on, empty without. adapters: what the
    masters are of, see `LoraNetwork.specs`; empty in states from before it was kept. parts: see `parts`, likewise."""

    step: int
    batches: int
    masters: dict[str, Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    scaler: dict[str, Any]
    loss: list[float]
    lineage: str
    machine: dict[str, str]
    average: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    adapters: list[dict[str, Any]] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)


def state_path(folder: Path, step: int) -> Path:
    return folder / f"state-{step:06d}{STATE_SUFFIX}"


def save_state(path: Path, state: TrainingState) -> None:
    """Writes the whole state at once or not at all. Raises ValueError where the disk is full."""
    moving = {"optimizer": state.optimizer, "scheduler": state.scheduler, "scaler": state.scaler}
    if state.average:
        moving["average"] = state.average
    tensors, tree = pack_state(moving, "state")
    tensors |= {f"{MASTERS}{name}": tensor.to("cpu").contiguous() for name, tensor in state.masters.items()}
    plain = {
        "format": _FORMAT,
        "step": state.step,
        "batches": state.batches,
        "loss": state.loss,
        "lineage": state.lineage,
        "machine": state.machine,
        "tree": tree,
    }
    plain |= {name: value for name in _LATER if (value := getattr(state, name))}
    metadata = {"tessera": json.dumps(plain, allow_nan=False)}
    write_atomically(path, lambda beside: safetensors.torch.save_file(tensors, beside, metadata=metadata))


def load_state(path: Path) -> TrainingState:
    """Raises ValueError where the file is no state of ours or is damaged."""
    plain = read_header(path)
    try:
        tensors, _ = read_tensors(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise _damaged(path) from error
    moving = unpack_state(tensors, plain["tree"])
    masters = {n.removeprefix(MASTERS): t for n, t in tensors.items() if n.startswith(MASTERS)}
    return TrainingState(
        step=plain["step"],
        batches=plain["batches"],
        masters=masters,
        optimizer=moving["optimizer"],
        scheduler=moving["scheduler"],
        scaler=moving["scaler"],
        loss=plain["loss"],
        lineage=plain["lineage"],
        machine=plain["machine"],
        average=moving.get("average", {}),
        **{name: plain[name] for name in _LATER if name in plain},
    )


def read_header(path: Path) -> dict[str, Any]:
    """The plain part of a state, without its tensors. Raises ValueError where the file is no whole state."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            plain = json.loads((file.metadata() or {})["tessera"])
    except (OSError, KeyError, json.JSONDecodeError, safetensors.SafetensorError) as error:
        raise _damaged(path) from error
    if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
        raise _damaged(path)
    return plain


def _damaged(path: Path) -> ValueError:
    return ValueError(f"resume: {path.name} is not a whole state of this version; choose another state, or 'off'.")

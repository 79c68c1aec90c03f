"""Training state in one file: fp32 LoRA weights, optimizer, schedule, data position and losses.

The container is safetensors with the ending `.tessera`, so that no LoRA loader lists it. Nothing is pickled.
Random generators have no state to save: every number is a function of (seed, purpose, step, sample).
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
MASTER_WEIGHTS_PREFIX = "masters."
_FORMAT = 1
# Optional fields: not in every state.
_LATER = ("validation", "adapters", "parts")


@dataclass(frozen=True)
class TrainingState:
    """State of a run after an optimizer step.

    step: optimizer steps done.
    batches: micro-batches done.
    master_weights: fp32 LoRA weights by name.
    optimizer: state of the optimizer with the name of its class.
    scheduler: state of the learning rate scheduler.
    scaler: state of the gradient scaler.
    loss: loss of each step.
    lineage: fingerprint of everything but the run's length, see `TrainSettings.lineage`.
    environment: hardware and software that the last bits of a result may depend on.
    average: EMA of the LoRA, empty without one.
    validation: points (`validation.Validation`) and the validation key, empty without validation.
    adapters: specs of the adapters, see `LoraNetwork.specs`; empty in old states.
    parts: segments of the run, see `checkpoint.history`; empty in old states.
    """

    step: int
    batches: int
    master_weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    scaler: dict[str, Any]
    loss: list[float]
    lineage: str
    environment: dict[str, str]
    average: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    adapters: list[dict[str, Any]] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)


def state_path(folder: Path, step: int) -> Path:
    """Return the path of the state of this step."""
    return folder / f"state-{step:06d}{STATE_SUFFIX}"


def save_state(path: Path, state: TrainingState) -> None:
    """Write a state atomically. Raises OSError where the disk refuses."""
    moving = {"optimizer": state.optimizer, "scheduler": state.scheduler, "scaler": state.scaler}
    if state.average:
        moving["average"] = state.average
    tensors, tree = pack_state(moving, "state")
    tensors |= {
        f"{MASTER_WEIGHTS_PREFIX}{name}": tensor.to("cpu").contiguous() for name, tensor in state.master_weights.items()
    }
    plain = {
        "format": _FORMAT,
        "step": state.step,
        "batches": state.batches,
        "loss": state.loss,
        "lineage": state.lineage,
        "machine": state.environment,
        "tree": tree,
    }
    plain |= {name: value for name in _LATER if (value := getattr(state, name))}
    metadata = {"tessera": json.dumps(plain, allow_nan=False)}
    write_atomically(path, lambda beside: safetensors.torch.save_file(tensors, beside, metadata=metadata))


def load_state(path: Path) -> TrainingState:
    """Read a state with its tensors on the CPU. Raises ValueError where the file is damaged or is not a state."""
    plain = read_header(path)
    try:
        tensors, _ = read_tensors(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise _damaged(path) from error
    moving = unpack_state(tensors, plain["tree"])
    master_weights = {
        n.removeprefix(MASTER_WEIGHTS_PREFIX): t for n, t in tensors.items() if n.startswith(MASTER_WEIGHTS_PREFIX)
    }
    return TrainingState(
        step=plain["step"],
        batches=plain["batches"],
        master_weights=master_weights,
        optimizer=moving["optimizer"],
        scheduler=moving["scheduler"],
        scaler=moving["scaler"],
        loss=plain["loss"],
        lineage=plain["lineage"],
        environment=plain["machine"],
        average=moving.get("average", {}),
        **{name: plain[name] for name in _LATER if name in plain},
    )


def read_header(path: Path) -> dict[str, Any]:
    """Read the plain fields of a state, without its tensors.

    Raises ValueError where the file is damaged or is not a state of this version.
    """
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

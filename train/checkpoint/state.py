"""Training state in one file: fp32 LoRA weights, optimizer, schedule, data position and losses.

The container is safetensors with the suffix `.tessera`, so that no LoRA loader lists it. Nothing is pickled.
Random generators have no state to save: every random number is a function of (seed, purpose, step, sample).
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from ...common.files import read_tensors, write_atomically
from ...common.untrusted.budgets import STATE_HEADER
from ...common.untrusted.tensor_files import metadata_field, open_tensors
from ..config.environment import VERSION
from ..optim.state_dict import pack_state, unpack_state
from ..runs.run_names import STATE_SUFFIX
from .schema import (
    FORMAT,
    MASTER_WEIGHTS_PREFIX,
    OPTIONAL,
    StateHeader,
    StoredTensor,
    UnreadableField,
    parse_header,
)

# Metadata entry with the version of the pack that wrote the state.
_WRITTEN_BY = "tessera_version"
_NUMBERS = ("F64", "F32", "F16", "BF16", "I64", "I32")
_INSTEAD = "choose another state, or 'off'."


class DamagedState(ValueError):
    """Error of a state that cannot be read. The message is for the user.

    lineage: lineage of the state, None if that cannot be read either.
    """

    def __init__(self, text: str, lineage: str | None = None):
        super().__init__(text)
        self.lineage = lineage


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
    adapters: specs of the adapters, see `LoraNetwork.specs`.
    parts: segments of the run, see `checkpoint.history`.
    average: EMA of the LoRA, empty without one.
    validation: points (`validation.Validation`) and the validation key, empty without validation.
    low_bit_matmul: layers that run full-precision matmuls because int8/fp8 would lose too much
        (`blocks.low_bit_policy.LowBitPolicy.decision`); empty if nothing was decided.
    pictures: losses by picture (`watch.picture_losses.PictureLosses`) and their key, empty without them.
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
    adapters: list[dict[str, Any]]
    parts: list[dict[str, Any]]
    average: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    low_bit_matmul: dict[str, Any] = field(default_factory=dict)
    pictures: dict[str, Any] = field(default_factory=dict)


def state_path(folder: Path, step: int) -> Path:
    """Return the path of the state of this step."""
    return folder / f"state-{step:06d}{STATE_SUFFIX}"


def save_state(path: Path, state: TrainingState) -> None:
    """Write a state atomically. Raises OSError if the write fails."""
    tensors, metadata = _contents(state)
    write_atomically(path, lambda temporary: safetensors.torch.save_file(tensors, temporary, metadata=metadata))


def state_size(state: TrainingState) -> int:
    """Return the bytes of the file that `save_state` would write."""
    return len(safetensors.torch.save(*_contents(state)))


def _contents(state: TrainingState) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a state's file and its metadata."""
    moving = {"optimizer": state.optimizer, "scheduler": state.scheduler, "scaler": state.scaler}
    if state.average:
        moving["average"] = state.average
    tensors, tree = pack_state(moving, "state")
    tensors |= {
        f"{MASTER_WEIGHTS_PREFIX}{name}": tensor.to("cpu").contiguous() for name, tensor in state.master_weights.items()
    }
    plain = {
        "format": FORMAT,
        "step": state.step,
        "batches": state.batches,
        "loss": state.loss,
        "lineage": state.lineage,
        "machine": state.environment,
        "tree": tree,
        "adapters": state.adapters,
        "parts": state.parts,
    }
    plain |= {name: value for name in OPTIONAL if (value := getattr(state, name))}
    return tensors, {"tessera": json.dumps(plain, allow_nan=False), _WRITTEN_BY: VERSION}


def load_state(path: Path) -> TrainingState:
    """Read a state with its tensors on the CPU. Raises DamagedState if the file is damaged or is not a state."""
    header = read_header(path)
    try:
        tensors, metadata = read_tensors(path)
        moving = unpack_state(tensors, metadata_field(metadata, "tessera", STATE_HEADER)["tree"])
    except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:  # replaced since the header was read
        raise _damaged(path) from error
    return TrainingState(
        step=header.step,
        batches=header.batches,
        master_weights={name: tensors[f"{MASTER_WEIGHTS_PREFIX}{name}"] for name in header.master_weights},
        optimizer=moving["optimizer"],
        scheduler=moving["scheduler"],
        scaler=moving["scaler"],
        loss=header.loss,
        lineage=header.lineage,
        environment=header.environment,
        adapters=header.adapters,
        parts=header.parts,
        average=moving.get("average", {}),
        validation=header.validation,
        low_bit_matmul=header.low_bit_matmul,
        pictures=header.pictures,
    )


def read_header(path: Path) -> StateHeader:
    """Read and check all of a state except the values of its tensors.

    Raises DamagedState if the file is damaged or is not a state of this version.
    """
    metadata: dict[str, str] = {}
    plain: Any = None
    try:
        with open_tensors(path) as file:
            metadata = file.metadata() or {}
            plain = metadata_field(metadata, "tessera", STATE_HEADER)
            tensors = {name: _stored(file, name) for name in file.keys()}  # noqa: SIM118
        return parse_header(plain, tensors)
    except UnreadableField as error:
        version = metadata.get(_WRITTEN_BY, "")
        lineage = plain.get("lineage") if isinstance(plain, dict) and error.name != "lineage" else None
        lineage = lineage if isinstance(lineage, str) else None
        if error.unknown:
            raise _unknown_field(path, error.name, version, lineage) from error
        raise damaged_field(path, error.name, lineage) from error
    except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
        raise _damaged(path) from error


def _stored(file: Any, name: str) -> StoredTensor:
    stored = file.get_slice(name)
    shape = tuple(stored.get_shape())
    single = shape in ((), (1,)) and stored.get_dtype() in _NUMBERS
    return StoredTensor(shape, stored.get_dtype(), float(file.get_tensor(name)) if single else None)


def damaged_field(path: Path, name: str, lineage: str | None = None) -> DamagedState:
    """Build the error for a field with an invalid value. Its name, which may be hostile, is truncated."""
    return DamagedState(
        f"resume: {path.name} is damaged: its field {name[:40]!r} has a wrong value; {_INSTEAD}", lineage
    )


def _unknown_field(path: Path, name: str, version: str, lineage: str | None) -> DamagedState:
    match = re.fullmatch(r"[0-9A-Za-z.+-]{1,20}", version)
    writer = f"version {version}" if match else "another version"
    return DamagedState(
        f"resume: {path.name} was written by {writer} of Tessera, and this one ({VERSION}) does not know its field "
        f"{name[:40]!r}; update Tessera, {_INSTEAD}",
        lineage,
    )


def _damaged(path: Path) -> DamagedState:
    return DamagedState(f"resume: {path.name} is incomplete or from another version; {_INSTEAD}")

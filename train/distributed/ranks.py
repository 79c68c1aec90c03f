"""Checks that all ranks of a run agree."""

from collections.abc import Mapping

import comfyui_version
import torch

from ..config.environment import VERSION
from ..report.errors import CannotContinue
from .world import World

_SAME_VERSION = "install the same version for all of them"
_MENDS = {
    "Tessera": _SAME_VERSION,
    "ComfyUI": _SAME_VERSION,
    "torch": _SAME_VERSION,
    "model": "give all of them the same model file",
    "data": "take Prepare Dataset, whose cache they share, and copy the same pictures to all hosts",
    "kind of matmul": "set low_bit_matmul on Training Memory to off, or take devices of one kind",
    "run": "give all of them the same workflow, with one Train LoRA in it",
    "shard": "switch it on or off for all of them",
    "state": "put ComfyUI's output folder where all hosts see the same files",
}


def rank_facts(model: str, data: str, run: str, state: str, shard: bool = False) -> dict[str, str]:
    """Return the facts that must be equal on all ranks before the first step.

    model, data, run: fingerprints of the model, of the data and of the run with its settings.
    state: file that the run resumes from; empty at step 0.
    shard: whether the devices of a machine shard blocks.
    """
    versions = {"Tessera": VERSION, "ComfyUI": comfyui_version.__version__, "torch": torch.__version__}
    return versions | {"model": model, "data": data, "run": run, "state": state, "shard": "on" if shard else "off"}


def check_alike(world: World, name: str, facts: Mapping[str, str]) -> None:
    """Compare facts across all ranks.

    name: of this comparison, unique in a run.
    facts: result of `rank_facts`, or a fingerprint of the trained weights under `LoRA`.

    Raises CannotContinue on rank 0 if they differ; the other ranks end with it.
    """
    if world.world_size == 1:
        return
    gathered = world.all_gather(name, dict(facts))
    for rank, rank_values in enumerate(gathered):
        for key, expected in gathered[0].items():
            if rank_values[key] == expected:
                continue
            if world.is_first:
                raise CannotContinue(_difference(rank, key, rank_values[key], expected))
            raise world.faults.exception()


def _difference(rank: int, name: str, value: str, expected: str) -> str:
    if name == "LoRA":
        return (
            f"Device {rank} and device 0 computed different LoRAs from the same gradients; use devices of the same "
            "model with the same driver."
        )
    values = "" if name in ("model", "data", "run") else f" ({value or 'none'}; device 0 has {expected or 'none'})"
    return f"Device {rank} has another {name} than device 0{values}; {_MENDS[name]}."

"""Checks that all ranks of a run are alike, and word to the others where one of them ends it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import comfyui_version
import torch

from ..checkpoint.metadata import VERSION
from ..errors import CannotContinue, error_sentence
from .world import World

_SAME_VERSION = "install the same version for all of them"
_MENDS = {
    "Tessera": _SAME_VERSION,
    "ComfyUI": _SAME_VERSION,
    "torch": _SAME_VERSION,
    "model": "give all of them the same model file",
    "data": "take Prepare Dataset, whose cache they share, and copy the same pictures to all hosts",
    "kind of product": "set products on Training Memory to full, or take devices of one kind",
    "run": "give all of them the same workflow, with one Train LoRA in it",
    "shard": "switch it on or off for all of them",
    "state": "put ComfyUI's output folder where all hosts see the same files",
}


@contextmanager
def others_told(world: World) -> Iterator[None]:
    """Tell the other ranks of an error within, so that none of them waits for this one."""
    try:
        yield
    except BaseException as error:
        world.tell(error, error_sentence(error))
        raise


def rank_facts(model: str, data: str, run: str, state: str, shard: bool = False) -> dict[str, str]:
    """Return what has to be equal on all ranks before the first step.

    model, data, run: fingerprints of the model, of the data and of the run with its settings.
    state: file that the run goes on from; empty at step 0.
    shard: the devices of a machine share blocks.
    """
    versions = {"Tessera": VERSION, "ComfyUI": comfyui_version.__version__, "torch": torch.__version__}
    return versions | {"model": model, "data": data, "run": run, "state": state, "shard": "on" if shard else "off"}


def check_alike(world: World, meeting: str, facts: Mapping[str, str]) -> None:
    """Meet the other ranks and compare facts with theirs.

    meeting: name of this meeting, once in a run.
    facts: as `rank_facts` gives them, or a fingerprint of the trained weights as `LoRA`.

    Raises CannotContinue, on rank 0, where they differ; the others end with it.
    """
    if world.is_lone:
        return
    found = world.exchange(meeting, dict(facts))
    for rank, theirs in enumerate(found):
        for what, ours in found[0].items():
            if theirs[what] != ours:
                raise CannotContinue(_difference(rank, what, theirs[what], ours)) if world.is_first else world.stopped()


def _difference(rank: int, what: str, theirs: str, ours: str) -> str:
    if what == "LoRA":
        return (
            f"Device {rank} and device 0 computed different LoRAs from the same gradients; use devices of the same "
            "model with the same driver."
        )
    values = "" if what in ("model", "data", "run") else f" ({theirs or 'none'}; device 0 has {ours or 'none'})"
    return f"Device {rank} has another {what} than device 0{values}; {_MENDS[what]}."

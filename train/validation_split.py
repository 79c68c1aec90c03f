"""Validation split: hold out files of the training data, and describe the split to the user."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..common.fingerprint import fingerprint
from ..common.rng import generator
from ..data.samples import Sample, TrainingData
from .settings import ValidationOptions


def hold_out(data: TrainingData, options: ValidationOptions) -> tuple[TrainingData, TrainingData]:
    """Split the data into (training samples, validation samples).

    Where `options.data` is given, nothing is held out. Otherwise each file gets a random number from (seed, file name),
    and the files with the smallest numbers are held out, at least one, with all windows of a video. Regularisation
    images are never held out. The split is stable: adding a file does not change the numbers of the others.

    Raises ValueError where nothing would be left to train on.
    """
    if options.data is not None:
        return data, options.data
    files = sorted({_file(sample) for sample in data.samples if not sample.regularisation})
    count = max(1, round(options.part * len(files)))
    if count >= len(files):
        raise ValueError(
            f"part {options.part:g} of Validation takes {count} of the {len(files)} files of data, so nothing is left "
            "to train on; lower part, add pictures, or connect data of its own to Validation."
        )
    held = set(sorted(files, key=lambda name: (_draw(options.seed, name), name))[:count])
    leaves = [_file(sample) in held and not sample.regularisation for sample in data.samples]
    sides = [tuple(s for s, left in zip(data.samples, leaves, strict=True) if left == side) for side in (False, True)]
    names = sorted(held)
    trained, measured = (
        replace(data, samples=samples, fingerprint=fingerprint(data.fingerprint, side, names))
        for samples, side in zip(sides, ("without", "only"), strict=True)
    )
    return trained, measured


def _file(sample: Sample) -> str:
    return sample.file or sample.name


def _draw(seed: int, name: str) -> float:
    return torch.rand((), generator=generator(seed, "held out", name), dtype=torch.float64).item()


def validation_notes(data: TrainingData, held: TrainingData, options: ValidationOptions) -> list[str]:
    """Make notes on unused options, file names in both sets, and graphs that only validation needs."""
    notes = []
    if options.data is not None:
        if options.part != ValidationOptions.part:
            notes.append("part of Validation is not used, because data is connected to it and all of that is measured.")
        if same := {_file(s) for s in data.samples} & {_file(s) for s in held.samples}:
            first = sorted(same)[0]
            notes.append(
                f"{len(same)} of the validation's files have the names of files that are trained on (such as {first}); "
                "if they are the same pictures, the validation loss says nothing about new ones."
            )
    if more := len(set(held.graph_keys()) - set(data.graph_keys())):
        notes.append(f"Validation has {more} that training doesn't have, and each is compiled too.")
    return notes


def held_out_note(held: TrainingData, full_data_fingerprint: str, parts: Sequence[Mapping[str, Any]]) -> str:
    """Name the held-out files, and tell whether an earlier segment of the run was trained on them.

    held: validation samples.
    full_data_fingerprint: fingerprint of the data before the split.
    parts: segments of the run, see `checkpoint.history.run_segments`.
    """
    names = sorted({_file(sample) for sample in held.samples})
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    *earlier, now = [(part.get("made_with", {}).get("data_fingerprint"), part.get("to_step")) for part in parts]
    others = [step for data, step in earlier if data != now[0]]
    if not others:
        return f"Held out for validation and not trained on: {shown}."
    nothing = "the validation loss says nothing about new pictures."
    if seen := [step for data, step in earlier if data == fingerprint(full_data_fingerprint)[:8]]:
        return f"Held out for validation: {shown}. Up to step {seen[-1]} these were trained on; {nothing}"
    return f"Held out for validation: {shown}. Up to step {others[-1]} these may have been trained on; if so, {nothing}"

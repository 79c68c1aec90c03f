"""Validation split: hold out files of the training data, and describe the split to the user."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...common.fingerprint import fingerprint
from ...common.rng import generator
from ...common.text import quantity
from ...data.samples import Sample, TrainingData
from ..config.settings import ValidationOptions


def hold_out(data: TrainingData, options: ValidationOptions) -> tuple[TrainingData, TrainingData]:
    """Split the data into (training samples, validation samples).

    If `options.data` is given, nothing is held out. Otherwise each file gets a random number from (seed, file name),
    and the files with the smallest numbers are held out, at least one, with all windows of a video. Regularisation
    images are never held out. The split is stable: adding a file does not change the numbers of the others.

    Raises ValueError if nothing would be left to train on.
    """
    if options.data is not None:
        return data, options.data
    files = sorted({_file(sample) for sample in data.samples if not sample.regularisation})
    count = max(1, round(options.part * len(files)))
    if count >= len(files):
        raise ValueError(
            f"part {options.part:g} of Validation takes {count} of the {quantity(len(files), 'file')} of data, so "
            "nothing is left to train on; lower part, add pictures, or connect data of its own to Validation."
        )
    held_files = set(sorted(files, key=lambda name: (_draw(options.seed, name), name))[:count])
    leaves = [_file(sample) in held_files and not sample.regularisation for sample in data.samples]
    sides = [tuple(s for s, flag in zip(data.samples, leaves, strict=True) if flag == side) for side in (False, True)]
    names = sorted(held_files)
    trained, measured = (
        replace(data, samples=samples, fingerprint=fingerprint(data.fingerprint, side, names))
        for samples, side in zip(sides, ("without", "only"), strict=True)
    )
    return trained, measured


def _file(sample: Sample) -> str:
    return sample.file or sample.name


def _draw(seed: int, name: str) -> float:
    return torch.rand((), generator=generator(seed, "held out", name), dtype=torch.float64).item()


def validation_notes(data: TrainingData, held_out: TrainingData, options: ValidationOptions) -> list[str]:
    """Make notes on unused options, file names in both sets, and graphs that only validation needs."""
    notes = []
    if options.data is not None:
        if shared_files := {_file(s) for s in data.samples} & {_file(s) for s in held_out.samples}:
            first = sorted(shared_files)[0]
            notes.append(
                f"{len(shared_files)} of the validation's files have the names of files that are trained on (such as "
                f"{first}); if they are the same pictures, the validation loss says nothing about new ones."
            )
    if extra_graphs := len(set(held_out.graph_keys()) - set(data.graph_keys())):
        notes.append(f"Validation has {extra_graphs} that training doesn't have, and each is compiled too.")
    return notes


def held_out_note(held_out: TrainingData, full_data_fingerprint: str, parts: Sequence[Mapping[str, Any]]) -> str:
    """Name the held-out files, and say whether an earlier segment of the run was trained on them.

    held_out: validation samples.
    full_data_fingerprint: fingerprint of the data before the split.
    parts: segments of the run, see `checkpoint.history.run_segments`.
    """
    names = sorted({_file(sample) for sample in held_out.samples})
    names_text = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    *earlier, current_part = [(part["made_with"]["data_fingerprint"], part.get("to_step")) for part in parts]
    other_steps = [step for data, step in earlier if data != current_part[0]]
    if not other_steps:
        return f"Held out for validation and not trained on: {names_text}."
    nothing = "the validation loss says nothing about new pictures."
    if trained_steps := [step for data, step in earlier if data == fingerprint(full_data_fingerprint)[:8]]:
        return f"Held out for validation: {names_text}. Up to step {trained_steps[-1]} these were trained on; {nothing}"
    return (
        f"Held out for validation: {names_text}. Up to step {other_steps[-1]} these may have been trained on; if so, "
        f"{nothing}"
    )

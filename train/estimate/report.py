"""Report of an estimate: sentences on what was measured, and a table of what other settings would take."""

from collections.abc import Iterator, Mapping
from typing import Any

from ...common.text import clock, quantity
from .changes import Alternative, cheapest_fitting
from .estimate import Estimate, Trial

MIB = 2**20
NOT_COUNTED = "Not counted: previews, validation, loading of the models and the check of a new model (verify)."
CALCULATED = "Calculated from the measured step, not tried:"


def describe(estimate: Estimate) -> list[str]:
    """Describe what was measured, a sentence each."""
    trial = estimate.trial
    lines = [*(_without_memory(estimate) if trial is None else _measured(estimate, trial)), *_disk(estimate)]
    lines += [f"Trained parameters: {estimate.parameters:,}."]
    lines += [estimate.preparation.cropping] * bool(estimate.preparation.cropping)
    return [*lines, NOT_COUNTED, *estimate.notes]


def rows(estimate: Estimate) -> list[tuple[str, ...]]:
    """Return the changes as rows of a table, its head first; empty without changes."""
    body = [_row(change, estimate.step_seconds) for change in estimate.changes]
    return [("change", "memory", "s/step", "fits"), *body] if body else []


def table(estimate: Estimate) -> str:
    """Format the rows in columns made by spaces, below a line that says what they are; empty without changes."""
    cells = rows(estimate)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([CALCULATED, *lines]) if lines else ""


def fixes(estimate: Estimate) -> list[Alternative]:
    """Return the cheapest changes with which the run fits; empty if it does already."""
    return [] if estimate.trial is not None else cheapest_fitting(estimate.changes)


def _row(change: Alternative, seconds: float | None) -> tuple[str, str, str, str]:
    time = f"x {change.seconds:.2f}" if seconds is None else _seconds(change.seconds * seconds)
    name = f"{change.name} {_value(change.before)} to {_value(change.after)}"
    return name, f"{'-' if change.bytes < 0 else '+'}{_size(abs(change.bytes))}", time, "yes" if change.fits else "no"


def _measured(estimate: Estimate, trial: Trial) -> Iterator[str]:
    if trial.seconds is None or estimate.step_seconds is None:
        yield "Every step compiled something, so the seconds of a step are unknown."
    elif estimate.shapes == 1:
        yield (
            f"Measured {_seconds(trial.seconds)} s per step: {clock(estimate.steps * trial.seconds)} for "
            f"{quantity(estimate.steps, 'step')}."
        )
    else:
        yield (
            f"Measured {_seconds(trial.seconds)} s per step of the largest pictures. Calculated for all "
            f"{estimate.shapes} sizes: {_seconds(estimate.step_seconds)} s per step, "
            f"{clock(estimate.steps * estimate.step_seconds)} for {quantity(estimate.steps, 'step')}."
        )
    if trial.graphs:
        rest = f" of the {trial.planned_graphs} that the run compiles" * (trial.planned_graphs != trial.graphs)
        yield f"Compiling took {_seconds(trial.compile_seconds)} s for {quantity(trial.graphs, 'graph')}{rest}."
    if estimate.preparation.seconds:
        yield f"Encoding the data took {_seconds(estimate.preparation.seconds)} s; it's in the cache now."
    yield _memory(trial.memory)
    yield _placement(trial.placement)


def _without_memory(estimate: Estimate) -> Iterator[str]:
    yield "It doesn't fit: the first steps ran out of memory."
    changes = fixes(estimate)
    if not changes:
        yield "No single change makes it fit; combine those of the table that save the most."
    for change in changes:
        yield f"It would fit with {change.name} at {_value(change.after)}."


def _memory(memory: Mapping[str, Any]) -> str:
    peak = _size(memory["peak_memory_mib"] * MIB)
    if "driver_memory_mib" not in memory:
        return f"Peak memory of the process: {peak}."
    used, size = (_size(memory[name] * MIB) for name in ("driver_memory_mib", "device_memory_mib"))
    return f"Peak memory of the GPU: {peak} by this run; {used} of {size} with everything else on it."


def _placement(placement: Mapping[str, Any]) -> str:
    checkpointing = f"checkpointing is {placement['checkpointing']}"
    if not placement["blocks_swapped"]:
        return f"No block streams; {checkpointing}."
    blocks = quantity(placement["blocks"], "block")
    return (
        f"{quantity(placement['blocks_swapped'], f'of {blocks} streams', f'of {blocks} stream')}, "
        f"{quantity(placement['block_copies_per_step'], 'copy', 'copies')} in a step; {checkpointing}."
    )


def _disk(estimate: Estimate) -> Iterator[str]:
    least = "at least " if estimate.trial is None else ""
    free = "" if estimate.free_disk is None else f"; {_size(estimate.free_disk)} are free"
    yield (
        f"A save takes {least}{_size(estimate.lora_bytes)} for the LoRA and {_size(estimate.state_bytes)} for the "
        f"state. At the end: LoRAs {estimate.loras}, states {estimate.states}, {_size(estimate.disk_bytes)} in all"
        f"{free}."
    )
    if estimate.preparation.cache_bytes:
        yield f"The encoded data takes {_size(estimate.preparation.cache_bytes)} in the cache."


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 0.1 else f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"

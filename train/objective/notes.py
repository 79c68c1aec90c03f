"""Notes on combinations of objective options."""

from ...common.unread import unread_notes
from .options import RESOLUTION_SAMPLINGS, ObjectiveOptions
from .timestep_sampling import Strata


def objective_notes(options: ObjectiveOptions, strata: Strata) -> tuple[str, ...]:
    """Make notes on objective options that were set and have no effect in this combination.

    strata: number of samples in an optimizer step and in an epoch.
    """
    notes = list(unread_notes(options))
    if options.shift > 0 and options.timestep_sampling in RESOLUTION_SAMPLINGS:
        notes.append(
            f"shift {options.shift:g} replaces the shift of {options.timestep_sampling}, which now works like "
            "logit_normal; set shift to 0 for the shift by resolution."
        )
    if options.stratified != "off" and {"batch": strata.step, "epoch": strata.epoch}[options.stratified] == 1:
        group = {"batch": "an optimizer step", "epoch": "an epoch"}[options.stratified]
        notes.append(f"stratified {options.stratified} is not used: {group} has one sample.")
    return tuple(notes)

"""Notes on combinations of objective options."""

from .options import RESOLUTION_SAMPLINGS, ObjectiveOptions


def objective_notes(options: ObjectiveOptions) -> tuple[str, ...]:
    """Make notes on objective options that change what another one does."""
    if options.shift == 0 or options.timestep_sampling not in RESOLUTION_SAMPLINGS:
        return ()
    return (
        f"shift {options.shift:g} replaces the shift of {options.timestep_sampling}, which now works like "
        "logit_normal; set shift to 0 for the shift by resolution.",
    )

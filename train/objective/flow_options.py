"""Check of flow matching options for models trained on a noise schedule, which predict noise or v."""

from .options import FLOW_SAMPLINGS, FLOW_WEIGHTINGS, TIMESTEP_SAMPLING, WEIGHTINGS, ObjectiveOptions


def check_schedule_options(options: ObjectiveOptions, title: str) -> tuple[str, ...]:
    """Make notes on the objective of a model with a noise schedule, whose noise levels are fractions of the schedule.

    title: title of the model.

    Raises ValueError for options that are defined on the sigma of flow matching alone.
    """
    for name, flow_only, values in (
        ("timestep_sampling", FLOW_SAMPLINGS, TIMESTEP_SAMPLING),
        ("weighting", FLOW_WEIGHTINGS, WEIGHTINGS),
    ):
        if (value := getattr(options, name)) in flow_only:
            alternatives = ", ".join(repr(choice) for choice in values if choice not in flow_only)
            raise ValueError(
                f"{name} is {value!r}, which is for flow matching models, and {title} is not one; choose one of "
                f"{alternatives}."
            )
    if options.timestep_sampling == ObjectiveOptions.timestep_sampling:
        return (
            f"timestep_sampling {options.timestep_sampling} picks the middle of the noise schedule of {title} more "
            "often; 'uniform' picks all of it equally, as Stable Diffusion was trained.",
        )
    return ()

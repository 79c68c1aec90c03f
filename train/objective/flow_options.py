"""Options of flow matching, checked for models that were trained on a noise schedule: to predict noise or v."""

from .options import FLOW_SAMPLINGS, FLOW_WEIGHTINGS, TIMESTEP_SAMPLING, WEIGHTINGS, ObjectiveOptions


def check_schedule_options(options: ObjectiveOptions, title: str) -> tuple[str, ...]:
    """Make notes on the objective of a model with a noise schedule, of which a level is then a share.

    title: of the model.

    Raises ValueError for options that are defined on the sigma of flow matching alone.
    """
    for name, flow_only, values in (
        ("timestep_sampling", FLOW_SAMPLINGS, TIMESTEP_SAMPLING),
        ("weighting", FLOW_WEIGHTINGS, WEIGHTINGS),
    ):
        if (value := getattr(options, name)) in flow_only:
            others = ", ".join(repr(one) for one in values if one not in flow_only)
            raise ValueError(
                f"{name} is {value!r}, which is for flow matching models, and {title} is not one; choose one of "
                f"{others}."
            )
    if options.timestep_sampling == ObjectiveOptions.timestep_sampling:
        return (
            f"timestep_sampling {options.timestep_sampling} picks the middle of the noise schedule of {title} more "
            "often; 'uniform' picks all of it equally, as Stable Diffusion was trained.",
        )
    return ()

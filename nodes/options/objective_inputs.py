"""Advanced inputs of Training Objective: timestep sampling and terms of the loss."""

from comfy_api.latest import io

from ...train.objective.options import HUBER_SCHEDULES, SIGMA_RANGE, STRATIFIED, WEIGHTINGS, ObjectiveOptions


def _number(name: str, minimum: float, maximum: float, step: float, tooltip: str) -> io.Float.Input:
    """Build a float input for a noise level or a parameter of a formula."""
    return io.Float.Input(
        name,
        default=getattr(ObjectiveOptions, name),
        min=minimum,
        max=maximum,
        step=step,
        round=False,
        optional=True,
        advanced=True,
        tooltip=tooltip,
    )


def _choice(name: str, options: tuple[str, ...], tooltip: str) -> io.Combo.Input:
    return io.Combo.Input(
        name,
        options=list(options),
        default=getattr(ObjectiveOptions, name),
        optional=True,
        advanced=True,
        tooltip=tooltip,
    )


def noise_levels() -> list[io.Input]:
    return [
        _number(
            "logit_mean",
            -10.0,
            10.0,
            0.1,
            "Centre of logit_normal and the resolution_ samplings: above 0 towards noise, below 0 towards the picture.",
        ),
        _number(
            "logit_std",
            0.01,
            10.0,
            0.1,
            "Width of logit_normal and the resolution_ samplings: below 1 keeps to the centre, above 1 "
            "trains the ends more.",
        ),
        _number(
            "min_sigma",
            0.0,
            0.995,
            0.005,
            "The least noise level that is trained, 0 (the picture) to 1 (noise). Raise it to train composition "
            "only; for Wan 2.2's high noise expert alone set 0.875 (I2V: 0.9).",
        ),
        _number(
            "max_sigma",
            0.005,
            1.0,
            0.005,
            "The highest noise level that is trained. Lower it to train detail and style only; for Wan 2.2's "
            "low noise expert alone set 0.875 (I2V: 0.9).",
        ),
        _choice(
            "sigma_range",
            SIGMA_RANGE,
            "For min_sigma and max_sigma. cut: levels outside are left out, those inside keep their shares. squeeze: "
            "the distribution is squeezed into the range.",
        ),
        _number(
            "expert_boundary",
            0.0,
            0.995,
            0.005,
            "With both experts of Wan 2.2 connected: the noise level where the high noise expert hands over to the "
            "low noise one. 0 uses the model's own: 0.875, or 0.9 for image-to-video.",
        ),
        _number("sigmoid_scale", 0.01, 10.0, 0.1, "Width of sigmoid: above 1 trains the ends more."),
        _number(
            "mode_scale",
            -1.0,
            1.75,
            0.05,
            "Shape of mode: above 0 trains the middle more (but still the ends), below 0 the ends; 0 is uniform.",
        ),
        _number(
            "logsnr_mean",
            -20.0,
            20.0,
            0.5,
            "Centre of logsnr, the logarithm of signal to noise: below 0 towards noise. -6 is for styles.",
        ),
        _number("logsnr_std", 0.01, 20.0, 0.1, "Width of logsnr: above 2 spreads it further from its centre."),
        _number("beta_alpha", 0.05, 50.0, 0.1, "First shape of beta: raise it to train towards noise."),
        _number("beta_beta", 0.05, 50.0, 0.1, "Second shape of beta: raise it to train towards the picture."),
        io.String.Input(
            "sigma_curve",
            default=ObjectiveOptions.sigma_curve,
            optional=True,
            advanced=True,
            tooltip="The curve of custom: points sigma:weight in rising order, joined by straight lines, such as "
            "0:1, 0.5:3, 1:0. Levels outside the points are not trained.",
        ),
        _choice(
            "stratified",
            STRATIFIED,
            "Spreads the noise levels evenly, so the loss is less noisy; the distribution stays the same. off: each "
            "level is random. batch: evenly within a step. epoch: evenly within an epoch.",
        ),
    ]


def loss_terms() -> list[io.Input]:
    return [
        _choice(
            "weighting",
            WEIGHTINGS,
            "How much each level counts in the loss. none: all equally. sigma_sqrt: 1/sigma², mostly detail. cosmap: "
            "the middle twice the ends. min_snr: see min_snr_gamma. The chart shows it.",
        ),
        _number(
            "min_snr_gamma",
            0.01,
            100.0,
            0.5,
            "With weighting min_snr: the signal-to-noise ratio above which levels count no more; 5 is usual, lower "
            "trains detail less.",
        ),
        _number(
            "huber_c",
            0.0001,
            10.0,
            0.05,
            "With loss huber or pseudo_huber: errors above this count linearly, not squared.",
        ),
        _choice(
            "huber_schedule",
            HUBER_SCHEDULES,
            "How huber_c follows the noise level. constant: not at all. snr, exponential: from 1 at the "
            "picture to huber_c at noise.",
        ),
        _number(
            "ip_noise_gamma",
            0.0,
            1.0,
            0.05,
            "Input perturbation: adds this much extra noise to the input, so the model learns to correct its own "
            "errors. 0 turns it off; 0.1 is usual.",
        ),
        io.Boolean.Input(
            "ip_noise_gamma_random_strength",
            default=ObjectiveOptions.ip_noise_gamma_random_strength,
            optional=True,
            advanced=True,
            tooltip="Picks the strength of each sample's input perturbation at random between 0 and ip_noise_gamma.",
        ),
        _number(
            "noise_offset",
            0.0,
            1.0,
            0.01,
            "Shifts the noise of each channel by this much, so very dark and very bright pictures are learnt. 0 "
            "turns it off; flow models rarely need it.",
        ),
    ]

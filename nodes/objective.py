"""The node that sets which noise levels are trained and what the loss is."""

from comfy_api.latest import io

from ..train.objective.picture import draw_distribution
from ..train.options import (
    HUBER_SCHEDULES,
    LOSSES,
    SIGMA_RANGE,
    STRATIFIED,
    TIMESTEP_SAMPLING,
    WEIGHTINGS,
    ObjectiveOptions,
)
from .images import image_tensor

ObjectiveType = io.Custom("TESSERA_OBJECTIVE")


def _sigma(name: str, default: float, tooltip: str, least: float = 0.0, most: float = 1.0) -> io.Float.Input:
    """An input for a noise level."""
    return io.Float.Input(
        name,
        default=default,
        min=least,
        max=most,
        step=0.005,
        round=False,
        optional=True,
        advanced=True,
        tooltip=tooltip,
    )


def _number(name: str, least: float, most: float, step: float, tooltip: str) -> io.Float.Input:
    """An input for a parameter of a formula."""
    return io.Float.Input(
        name,
        default=getattr(ObjectiveOptions, name),
        min=least,
        max=most,
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


class TesseraObjective(io.ComfyNode):
    """Which noise levels are trained, and what the loss is."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraObjective",
            display_name="Training Objective",
            category="Tessera/training",
            description="Sets which noise levels are trained most and what the loss is, and shows the levels as a "
            "picture. Connect it to Train LoRA.",
            search_aliases=["timestep sampling", "sigma", "shift", "guidance", "huber", "min snr", "noise offset"],
            inputs=[
                io.Combo.Input(
                    "timestep_sampling",
                    options=list(TIMESTEP_SAMPLING),
                    default=ObjectiveOptions.timestep_sampling,
                    tooltip="How often each noise level is trained. logit_normal: mostly the middle ones, good for "
                    "nearly all. uniform: all alike, more fine detail. resolution_shifted: more noise for larger "
                    "pictures, as FLUX's sampler does, good for composition and likeness; resolution_flux2 and "
                    "resolution_qwen as those samplers do. sigmoid, mode, logsnr, beta, custom: the shapes of the "
                    "inputs with these names.",
                ),
                io.Float.Input(
                    "shift",
                    default=ObjectiveOptions.shift,
                    min=0.0,
                    max=100.0,
                    step=0.05,
                    round=False,
                    tooltip="Moves the noise levels: above 1 towards noise (composition), below 1 towards the picture "
                    "(detail). 0 takes what suits the model, and none for logsnr and custom; any other value also "
                    "replaces the shift of the resolution_ samplings.",
                ),
                io.Combo.Input(
                    "loss",
                    options=list(LOSSES),
                    default=ObjectiveOptions.loss,
                    tooltip="How the velocity's error is measured. mse: its mean square. huber, pseudo_huber: as mse "
                    "for errors below huber_c, as l1 above, so that odd pictures pull less. l1: its mean size.",
                ),
                io.Float.Input(
                    "guidance",
                    default=ObjectiveOptions.guidance,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=False,
                    tooltip="What a guidance-distilled model such as FLUX.1 dev is told while it trains; 1 suits "
                    "LoRAs, whatever guidance you sample with later. Models without this input do not read it.",
                ),
                io.Float.Input(
                    "logit_mean",
                    default=ObjectiveOptions.logit_mean,
                    min=-10.0,
                    max=10.0,
                    step=0.1,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="Centre of logit_normal and the resolution_ samplings: above 0 towards noise, below 0 "
                    "towards the picture.",
                ),
                io.Float.Input(
                    "logit_std",
                    default=ObjectiveOptions.logit_std,
                    min=0.01,
                    max=10.0,
                    step=0.1,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="Width of logit_normal and the resolution_ samplings: below 1 keeps to the centre, above 1 "
                    "trains the ends more.",
                ),
                _sigma(
                    "min_sigma",
                    ObjectiveOptions.min_sigma,
                    "The least noise level that is trained, 0 (the picture) to 1 (noise). Raise it to train "
                    "composition only; for Wan 2.2's high noise expert alone set 0.875 (I2V: 0.9).",
                    most=0.995,
                ),
                _sigma(
                    "max_sigma",
                    ObjectiveOptions.max_sigma,
                    "The highest noise level that is trained. Lower it to train detail and style only; for Wan 2.2's "
                    "low noise expert alone set 0.875 (I2V: 0.9).",
                    least=0.005,
                ),
                io.Combo.Input(
                    "sigma_range",
                    options=list(SIGMA_RANGE),
                    default=ObjectiveOptions.sigma_range,
                    optional=True,
                    advanced=True,
                    tooltip="With min_sigma or max_sigma set. cut: levels outside are not drawn, those inside keep "
                    "their shares. squeeze: the whole distribution is mapped onto the range, shape and all.",
                ),
                _sigma(
                    "expert_boundary",
                    ObjectiveOptions.expert_boundary,
                    "With both experts of Wan 2.2 connected: the noise level where the high noise expert hands over to "
                    "the low noise one. 0 takes the model's own: 0.875, and 0.9 for image-to-video.",
                    most=0.995,
                ),
                _number("sigmoid_scale", 0.01, 10.0, 0.1, "Width of sigmoid: above 1 trains the ends more."),
                _number(
                    "mode_scale",
                    -1.0,
                    1.75,
                    0.05,
                    "Shape of mode: above 0 the middle is trained more and the ends still are, below 0 the ends more; "
                    "0 is uniform.",
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
                    tooltip="The curve of custom: points of sigma:weight in rising order, joined by straight lines, "
                    "such as 0:1, 0.5:3, 1:0. Levels outside the points are not trained.",
                ),
                _choice(
                    "stratified",
                    STRATIFIED,
                    "Spreads the drawn levels evenly. off: each is drawn for itself. batch: over a step's samples. "
                    "epoch: over as many draws as an epoch has. The loss is less noisy, the distribution the same.",
                ),
                _choice(
                    "weighting",
                    WEIGHTINGS,
                    "How much each level counts in the loss. none: all alike. sigma_sqrt: 1/sigma², mostly detail. "
                    "cosmap: the middle twice the ends. min_snr: as min_snr_gamma says. The picture shows it.",
                ),
                _number(
                    "min_snr_gamma",
                    0.01,
                    100.0,
                    0.5,
                    "With weighting min_snr: the signal to noise above which levels count no more; 5 is usual, lower "
                    "trains detail less.",
                ),
                _number(
                    "huber_c",
                    0.0001,
                    10.0,
                    0.05,
                    "With loss huber or pseudo_huber: the size of error from which it counts by its size, not its "
                    "square.",
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
                    "Input perturbation: the model is shown this much more noise than it is to find, so that it learns "
                    "to mend its own errors. 0 turns it off; 0.1 is usual.",
                ),
                io.Boolean.Input(
                    "ip_noise_gamma_random_strength",
                    default=ObjectiveOptions.ip_noise_gamma_random_strength,
                    optional=True,
                    advanced=True,
                    tooltip="Draws the strength of each sample's input perturbation between 0 and ip_noise_gamma.",
                ),
                _number(
                    "noise_offset",
                    0.0,
                    1.0,
                    0.01,
                    "Shifts the noise of each channel as a whole by this much, so that very dark and very bright "
                    "pictures are learnt. 0 turns it off; flow models seldom need it.",
                ),
                io.Float.Input(
                    "preservation_weight",
                    default=ObjectiveOptions.preservation_weight,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=False,
                    optional=True,
                    tooltip="Differential output preservation: holds what the model makes of class_word (of Training "
                    "Images) to what it made before. 0 is off. 1 keeps other people as they were while one person is "
                    "learnt; a step takes about twice as long.",
                ),
            ],
            outputs=[
                ObjectiveType.Output(display_name="objective"),
                io.Image.Output(display_name="distribution", tooltip="The noise levels that are drawn, as a picture."),
            ],
        )

    @classmethod
    def execute(
        cls,
        timestep_sampling: str,
        shift: float,
        loss: str,
        guidance: float,
        logit_mean: float = ObjectiveOptions.logit_mean,
        logit_std: float = ObjectiveOptions.logit_std,
        min_sigma: float = ObjectiveOptions.min_sigma,
        max_sigma: float = ObjectiveOptions.max_sigma,
        sigma_range: str = ObjectiveOptions.sigma_range,
        expert_boundary: float = ObjectiveOptions.expert_boundary,
        sigmoid_scale: float = ObjectiveOptions.sigmoid_scale,
        mode_scale: float = ObjectiveOptions.mode_scale,
        logsnr_mean: float = ObjectiveOptions.logsnr_mean,
        logsnr_std: float = ObjectiveOptions.logsnr_std,
        beta_alpha: float = ObjectiveOptions.beta_alpha,
        beta_beta: float = ObjectiveOptions.beta_beta,
        sigma_curve: str = ObjectiveOptions.sigma_curve,
        stratified: str = ObjectiveOptions.stratified,
        weighting: str = ObjectiveOptions.weighting,
        min_snr_gamma: float = ObjectiveOptions.min_snr_gamma,
        huber_c: float = ObjectiveOptions.huber_c,
        huber_schedule: str = ObjectiveOptions.huber_schedule,
        ip_noise_gamma: float = ObjectiveOptions.ip_noise_gamma,
        ip_noise_gamma_random_strength: bool = ObjectiveOptions.ip_noise_gamma_random_strength,
        noise_offset: float = ObjectiveOptions.noise_offset,
        preservation_weight: float = ObjectiveOptions.preservation_weight,
    ) -> io.NodeOutput:
        options = ObjectiveOptions(
            timestep_sampling=timestep_sampling,
            shift=shift,
            loss=loss,
            guidance=guidance,
            logit_mean=logit_mean,
            logit_std=logit_std,
            min_sigma=min_sigma,
            max_sigma=max_sigma,
            sigma_range=sigma_range,
            expert_boundary=expert_boundary,
            sigmoid_scale=sigmoid_scale,
            mode_scale=mode_scale,
            logsnr_mean=logsnr_mean,
            logsnr_std=logsnr_std,
            beta_alpha=beta_alpha,
            beta_beta=beta_beta,
            sigma_curve=sigma_curve,
            stratified=stratified,
            weighting=weighting,
            min_snr_gamma=min_snr_gamma,
            huber_c=huber_c,
            huber_schedule=huber_schedule,
            ip_noise_gamma=ip_noise_gamma,
            ip_noise_gamma_random_strength=ip_noise_gamma_random_strength,
            noise_offset=noise_offset,
            preservation_weight=preservation_weight,
        )
        return io.NodeOutput(options, image_tensor(draw_distribution(options)))


NODES: list[type[io.ComfyNode]] = [TesseraObjective]

"""Options of timestep sampling, noise and loss."""

import math
from dataclasses import dataclass
from functools import cached_property

from ...common.text import finite, one_of, within
from .sigma_curve import SigmaCurve, parse_curve

SIGMA_RANGE = ("cut", "squeeze")
RESOLUTION_SAMPLINGS = ("resolution_shifted", "resolution_flux2", "resolution_qwen")
TIMESTEP_SAMPLING = (
    "logit_normal",
    "uniform",
    "resolution_shifted",
    "resolution_flux2",
    "resolution_qwen",
    "sigmoid",
    "mode",
    "logsnr",
    "beta",
    "custom",
)
STRATIFIED = ("off", "batch", "epoch")
LOSSES = ("mse", "huber", "pseudo_huber", "l1")
HUBER_SCHEDULES = ("constant", "snr", "exponential")
WEIGHTINGS = ("none", "sigma_sqrt", "cosmap", "min_snr")
# Defined only on the sigma of flow matching.
FLOW_WEIGHTINGS = ("sigma_sqrt", "cosmap")
FLOW_SAMPLINGS = RESOLUTION_SAMPLINGS + ("logsnr",)
MAX_MODE_SCALE = 2 / (math.pi - 2)  # above it the mapping of mode sampling is not monotonic


@dataclass(frozen=True)
class ObjectiveOptions:
    """Objective options (TESSERA_OBJECTIVE). Formulas are in `distribution`, `loss`, `noise`, `preservation` and
    `guidance_loss`.

    timestep_sampling: one of TIMESTEP_SAMPLING, see `distribution.distribution_of`.
    shift: shift of the sampled sigmas towards noise, s·sigma / (1 + (s − 1)·sigma); 0 uses the family's shift.
    loss: one of LOSSES, see `loss.velocity_loss`.
    guidance: guidance input of a guidance-distilled model during training.
    logit_mean: mean of logit_normal and the resolution_… samplings.
    logit_std: standard deviation of the same.
    min_sigma: lower end of the sigma range.
    max_sigma: upper end of the sigma range.
    sigma_range: 'cut' samples the distribution conditioned on the range; 'squeeze' maps all of it onto the range.
    expert_boundary: sigma between the experts of Wan 2.2; 0 uses the model's value.
    sigmoid_scale: scale of sigmoid.
    mode_scale: s of mode, -1 to MAX_MODE_SCALE.
    logsnr_mean: mean of logsnr.
    logsnr_std: standard deviation of logsnr.
    beta_alpha: alpha of beta.
    beta_beta: beta of beta.
    sigma_curve: points of custom, see `sigma_curve.parse_curve`.
    stratified: stratify the samples of a step ('batch') or of an epoch ('epoch'), or 'off'.
    weighting: one of WEIGHTINGS, see `loss.sigma_weight`.
    min_snr_gamma: gamma of min_snr.
    huber_c: threshold of the Huber losses.
    huber_schedule: one of HUBER_SCHEDULES, see `loss.huber_threshold`.
    ip_noise_gamma: strength of input perturbation, 0 to 1.
    ip_noise_gamma_random_strength: sample the strength for each sample.
    noise_offset: strength of offset noise, 0 to 1.
    preservation_weight: weight of the preservation loss, 0 is off.
    guidance_loss_scale: g of the guidance-preserving loss, see `guidance_loss.guided_target`; 0 is off; 1 has no
        effect either and becomes 0.
    """

    timestep_sampling: str = "logit_normal"
    shift: float = 0.0
    loss: str = "mse"
    guidance: float = 1.0
    logit_mean: float = 0.0
    logit_std: float = 1.0
    min_sigma: float = 0.0
    max_sigma: float = 1.0
    sigma_range: str = "cut"
    expert_boundary: float = 0.0
    sigmoid_scale: float = 1.0
    mode_scale: float = 1.29
    logsnr_mean: float = -6.0
    logsnr_std: float = 2.0
    beta_alpha: float = 2.0
    beta_beta: float = 2.0
    sigma_curve: str = "0:1, 1:1"
    stratified: str = "off"
    weighting: str = "none"
    min_snr_gamma: float = 5.0
    huber_c: float = 0.1
    huber_schedule: str = "constant"
    ip_noise_gamma: float = 0.0
    ip_noise_gamma_random_strength: bool = False
    noise_offset: float = 0.0
    preservation_weight: float = 0.0
    guidance_loss_scale: float = 0.0

    def __post_init__(self) -> None:
        finite(self)
        one_of("sigma_range", self.sigma_range, SIGMA_RANGE)
        if not 0 <= self.min_sigma < self.max_sigma <= 1:
            raise ValueError(
                f"min_sigma is {self.min_sigma} and max_sigma {self.max_sigma}; set min_sigma below max_sigma, both "
                "between 0 (the picture) and 1 (noise)."
            )
        if not 0 <= self.expert_boundary < 1:
            raise ValueError(f"expert_boundary is {self.expert_boundary}; set it to 0 (the model's own) or below 1.")
        one_of("timestep_sampling", self.timestep_sampling, TIMESTEP_SAMPLING)
        one_of("stratified", self.stratified, STRATIFIED)
        one_of("loss", self.loss, LOSSES)
        one_of("huber_schedule", self.huber_schedule, HUBER_SCHEDULES)
        one_of("weighting", self.weighting, WEIGHTINGS)
        if self.shift < 0:
            raise ValueError(f"shift is {self.shift}; set it to 0 (the family's own) or more.")
        for name in ("logit_std", "sigmoid_scale", "logsnr_std", "beta_alpha", "beta_beta", "min_snr_gamma", "huber_c"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; set it above 0.")
        if not -1 <= self.mode_scale <= MAX_MODE_SCALE:
            raise ValueError(f"mode_scale is {self.mode_scale}; set it between -1 and {MAX_MODE_SCALE:.4f}.")
        for name in ("ip_noise_gamma", "noise_offset"):
            within(name, getattr(self, name), 0.0, 1.0)
        within("preservation_weight", self.preservation_weight, 0.0, 100.0)
        if self.guidance_loss_scale == 1:  # both values are the same run and must give the same key
            object.__setattr__(self, "guidance_loss_scale", 0.0)
        if self.guidance_loss_scale and not 1 < self.guidance_loss_scale <= 100:
            raise ValueError(
                f"guidance_loss_scale is {self.guidance_loss_scale}; set it to 0 (off), or above 1 and up to 100."
            )
        _ = self.curve
        if self.guidance < 0:
            raise ValueError(f"guidance is {self.guidance}; set it to 0 or more (1 suits LoRA training).")

    @cached_property
    def curve(self) -> SigmaCurve:
        """The distribution of `sigma_curve`. Raises ValueError for points that make none."""
        return parse_curve(self.sigma_curve)

"""The objective of rectified flow: which noise levels are drawn, what the model is shown, and what it is to say.

Sigma is the noise level: 0 is the picture, 1 is noise, and on the straight path between them x_t = (1 − sigma)·x0 +
sigma·noise the velocity is noise − x0 (Liu et al. 2022, arXiv 2209.03003; Esser et al. 2024, arXiv 2403.03206, sec. 2).
"""

from .loss import huber_threshold, sigma_weight, training_loss, velocity_loss
from .noise import draw_noise, noised, perturbed, velocity_target
from .notes import objective_notes
from .sampling import Strata, check_range, draw_sigma, part_below, shift_of, shift_sigma, stratum_of

__all__ = [
    "Strata",
    "check_range",
    "draw_noise",
    "draw_sigma",
    "huber_threshold",
    "noised",
    "objective_notes",
    "part_below",
    "perturbed",
    "shift_of",
    "shift_sigma",
    "sigma_weight",
    "stratum_of",
    "training_loss",
    "velocity_loss",
    "velocity_target",
]

"""Learning rate schedules: the factor on the learning rate as a closed formula of the step."""

import math
from collections.abc import Callable

from ...common.text import quantity
from .lr_curve import on_curve
from .options import OptimizerOptions

# These factors do not depend on the run's length, so that a finished run can be resumed with more steps.
ENDLESS_SCHEDULERS = ("constant", "inverse_sqrt")
INVERSE_SQRT_STEPS = 10_000  # time scale without a warm-up, the default of transformers


def lr_factor(options: OptimizerOptions, total_steps: int) -> Callable[[int], float]:
    """Make the function from a step, counted from 0, to the factor on the learning rate.

    total_steps: optimizer steps of the run, earlier sessions included.

    Warm-up of w steps: (step + 1) / w times the schedule's first factor, so that the first step is not lost. After it,
    with p = (step − w) / (total − w) from 0 to 1, the factor is r + (1 − r)·f(p), with r = `min_lr_ratio` and f as

    - linear: 1 − p
    - cosine: (1 + cos(π·p)) / 2 (Loshchilov & Hutter 2017, arXiv 1608.03983, eq. 5)
    - cosine_with_restarts: cosine of p' = p·`lr_cycles` mod 1, and 0 at p = 1
    - polynomial: (1 − p)^`lr_power` (transformers' get_polynomial_decay_schedule_with_warmup)
    - warmup_stable_decay: 1, then 1 − √q, q from 0 to 1 over the last `lr_decay_part` of p (Hägele et al. 2024,
      arXiv 2405.18392, section 3; named by Hu et al. 2024, arXiv 2404.06395)
    - rex: (1 − p) / (1 − p / 2) (Chen et al. 2021, arXiv 2107.04197)

    Three schedules have other formulas:

    - constant: 1
    - inverse_sqrt: max(r, √(t / (t + step − w))) with t = w, or 10 000 if w is 0 (transformers'
      get_inverse_sqrt_schedule, after Vaswani et al. 2017, arXiv 1706.03762, eq. 3)
    - curve: linear interpolation of the points of `lr_curve`

    Raises ValueError if the warm-up is as long as the run, or the curve begins at 0 after a warm-up.
    """
    warmup = options.warmup_steps
    low = options.min_lr_ratio
    kind = options.lr_scheduler
    if warmup >= total_steps:
        raise ValueError(
            f"warmup_steps is {warmup} and the run has {quantity(total_steps, 'step')}; set warmup_steps below "
            f"{total_steps}."
        )
    falling = _falling(options)
    curve = options.curve if kind == "curve" else ()
    begins_at = on_curve(curve, 0.0) if curve else 1.0
    if warmup and begins_at == 0:
        raise ValueError(
            f"warmup_steps is {warmup} and lr_curve begins at 0, to which there is nothing to warm up; set "
            "warmup_steps to 0 and draw the warm-up, such as '0:0, 5:1, 100:0.1'."
        )

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup * begins_at
        if kind == "constant":
            return 1.0
        if kind == "inverse_sqrt":
            scale = warmup or INVERSE_SQRT_STEPS
            return max(low, math.sqrt(scale / (scale + step - warmup)))
        progress = min(1.0, (step - warmup) / (total_steps - warmup))
        if kind == "curve":
            return on_curve(curve, progress)
        # Not through `falling`: another order of operations would change the last bits of these rates, and resumed
        # runs must continue exactly.
        if kind == "linear":
            return 1.0 - (1.0 - low) * progress
        if kind == "cosine":
            return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
        return low + (1.0 - low) * falling[kind](progress)

    return factor


def _falling(options: OptimizerOptions) -> dict[str, Callable[[float], float]]:
    """Return f(p) of `lr_factor` by schedule, without linear and cosine."""

    def restarts(p: float) -> float:
        return 0.0 if p >= 1 else 0.5 * (1.0 + math.cos(math.pi * (p * options.lr_cycles % 1.0)))

    def stable_decay(p: float) -> float:
        return 1.0 - math.sqrt(max(0.0, (p - 1.0) / options.lr_decay_part + 1.0))

    return {
        "cosine_with_restarts": restarts,
        "polynomial": lambda p: (1.0 - p) ** options.lr_power,
        "warmup_stable_decay": stable_decay,
        "rex": lambda p: (1.0 - p) / (1.0 - p / 2.0),
    }

"""What a user may set about a run, as frozen dataclasses with the defaults that unconnected options take.

Each class checks its own values when it is made, so that bad input ends before any work is done.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

from ..memory.pinning import PIN_MEMORY
from .optimizer_class import package_of, parse_args
from .schedule import parse_curve as parse_lr_curve
from .sigma_curve import parse_curve as parse_sigma_curve

CHECKPOINTING = ("none", "selective", "full", "auto")
ATTENTION = ("auto", "sdpa", "flash-attn")
SIGMA_RANGE = ("cut", "squeeze")
RESOLUTION_SAMPLINGS = ("resolution_shifted", "resolution_flux2", "resolution_qwen")
TIMESTEP_SAMPLING = (
    "logit_normal",
    "uniform",
    *RESOLUTION_SAMPLINGS,
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
MOST_MODE_SCALE = 2 / (math.pi - 2)  # above it, mode's formula turns back on itself
OPTIMIZERS = ("adamw", "adamw8bit", "prodigy", "adafactor", "came", "adamw_schedulefree", "lion", "muon", "custom")
LR_SCHEDULERS = (
    *("constant", "cosine", "linear", "cosine_with_restarts", "polynomial", "warmup_stable_decay", "rex"),
    *("inverse_sqrt", "curve"),
)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(allowed)}.")


def _finite(options: Any) -> None:
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{field.name} is {value}; give a finite number.")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; set it between {low} and {high}.")


@dataclass(frozen=True)
class NetworkOptions:
    """The adapter to train (TESSERA_NETWORK).

    `include` and `exclude` are glob patterns over module names such as `double_blocks.0.img_attn.qkv`; an empty
    `include` stands for the default targets of the model family. `alpha` scales the update by alpha / rank.
    `dropout` is the probability that an element of the rank activations (after the down projection) is dropped.
    """

    algorithm: str = "lora"
    rank: int = 16
    alpha: float = 16.0
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _finite(self)
        _one_of("algorithm", self.algorithm, ("lora",))
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; set it to 1 or more (16 suits most LoRAs).")
        if self.alpha <= 0:
            raise ValueError(f"alpha is {self.alpha}; set it above 0 (equal to rank keeps the update unscaled).")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; set it to 0 or more and below 1.")


@dataclass(frozen=True)
class OptimizerOptions:
    """How the LoRA's weights are stepped (TESSERA_OPTIMIZER). `max_grad_norm` of 0 turns clipping off.

    `optimizer_class` is the dotted name that 'custom' takes, `optimizer_args` has a `key=value` a line for any of
    them (see `optimizer_class.py`). `lr_cycles`, `lr_power`, `lr_decay_part` and `lr_curve` belong to a schedule each
    (see `schedule.lr_factor`). `ema_decay` above 0 saves a moving average of the LoRA
    (`optimizer_weights.LoraAverage`).
    """

    optimizer: str = "adamw"
    learning_rate: float = 1e-4
    lr_scheduler: str = "constant"
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    min_lr_ratio: float = 0.0
    lr_cycles: int = 3
    lr_power: float = 2.0
    lr_decay_part: float = 0.2
    lr_curve: str = "0:1, 50:1, 100:0.1"
    ema_decay: float = 0.0
    optimizer_class: str = ""
    optimizer_args: str = ""

    def __post_init__(self) -> None:
        _finite(self)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("lr_scheduler", self.lr_scheduler, LR_SCHEDULERS)
        if self.learning_rate <= 0:
            raise ValueError(
                f"learning_rate is {self.learning_rate}; set it above 0 (1e-4 suits AdamW, 1 suits Prodigy)."
            )
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is {self.warmup_steps}; set it to 0 or more.")
        if self.max_grad_norm < 0:
            raise ValueError(f"max_grad_norm is {self.max_grad_norm}; set it to 0 (no clipping) or more.")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay is {self.weight_decay}; set it to 0 or more.")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"beta1 and beta2 are {self.beta1} and {self.beta2}; both must be 0 or more and below 1.")
        if self.eps <= 0:
            raise ValueError(f"eps is {self.eps}; set it above 0.")
        _within("min_lr_ratio", self.min_lr_ratio, 0.0, 1.0)
        if self.lr_cycles < 1:
            raise ValueError(f"lr_cycles is {self.lr_cycles}; set it to 1 or more.")
        if self.lr_power <= 0:
            raise ValueError(f"lr_power is {self.lr_power}; set it above 0 (1 is a straight line).")
        if not 0 < self.lr_decay_part <= 1:
            raise ValueError(f"lr_decay_part is {self.lr_decay_part}; set it above 0 and to 1 at most.")
        if self.lr_scheduler == "curve":
            parse_lr_curve(self.lr_curve)
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay is {self.ema_decay}; set it to 0 (off) or more and below 1 (0.999 is usual).")
        parse_args(self.optimizer_args)
        if self.optimizer == "custom":
            package_of(self.optimizer_class)
        if self.optimizer == "adamw_schedulefree":
            if self.ema_decay:
                raise ValueError(
                    f"ema_decay is {self.ema_decay} and adamw_schedulefree averages the weights by itself; set "
                    "ema_decay to 0, or choose another optimizer."
                )
            if self.beta1 == 0:
                raise ValueError("beta1 is 0.0, by which adamw_schedulefree divides; set it above 0 (0.9 is usual).")


@dataclass(frozen=True)
class ObjectiveOptions:
    """Which noise levels are drawn and what the loss is (TESSERA_OBJECTIVE).

    `shift` moves the drawn sigmas towards noise: s·sigma / (1 + (s − 1)·sigma); 0 takes the family's own shift.
    `guidance` is what a guidance-distilled model is told while it trains.
    Sigmas lie between `min_sigma` and `max_sigma`: `sigma_range` 'cut' draws from the part of the distribution that
    does, 'squeeze' draws from all of it and maps it onto the range, shape and all. `expert_boundary` is the sigma where
    Wan 2.2's high noise expert hands over to the low noise one; 0 takes the model's own.
    `stratified` spreads the draws of a batch or of an epoch evenly over the distribution. `weighting` is how much a
    noise level counts in the loss. The formulas stand in `objective`: the parameters of a sampling in `distribution`
    (`sigma_curve` as in `sigma_curve.parse_curve`), `weighting`, `loss` and `huber_…` in `loss`, `ip_noise_…` and
    `noise_offset` in `noise`.
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

    def __post_init__(self) -> None:
        _finite(self)
        _one_of("sigma_range", self.sigma_range, SIGMA_RANGE)
        if not 0 <= self.min_sigma < self.max_sigma <= 1:
            raise ValueError(
                f"min_sigma is {self.min_sigma} and max_sigma {self.max_sigma}; set min_sigma below max_sigma, both "
                "between 0 (the picture) and 1 (noise)."
            )
        if not 0 <= self.expert_boundary < 1:
            raise ValueError(f"expert_boundary is {self.expert_boundary}; set it to 0 (the model's own) or below 1.")
        _one_of("timestep_sampling", self.timestep_sampling, TIMESTEP_SAMPLING)
        _one_of("stratified", self.stratified, STRATIFIED)
        _one_of("loss", self.loss, LOSSES)
        _one_of("huber_schedule", self.huber_schedule, HUBER_SCHEDULES)
        _one_of("weighting", self.weighting, WEIGHTINGS)
        if self.shift < 0:
            raise ValueError(f"shift is {self.shift}; set it to 0 (the family's own) or more.")
        for name in ("logit_std", "sigmoid_scale", "logsnr_std", "beta_alpha", "beta_beta", "min_snr_gamma", "huber_c"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; set it above 0.")
        if not -1 <= self.mode_scale <= MOST_MODE_SCALE:
            raise ValueError(f"mode_scale is {self.mode_scale}; set it between -1 and {MOST_MODE_SCALE:.4f}.")
        for name in ("ip_noise_gamma", "noise_offset"):
            _within(name, getattr(self, name), 0.0, 1.0)
        parse_sigma_curve(self.sigma_curve)
        if self.guidance < 0:
            raise ValueError(f"guidance is {self.guidance}; set it to 0 or more (1 suits LoRA training).")


@dataclass(frozen=True)
class MemoryOptions:
    """What is kept for backward, which attention kernel runs and which weights stay on the host (TESSERA_MEMORY).

    `checkpointing` 'auto' takes the fastest that fits. `activation_budget` is read by selective checkpointing only: the
    part of the activations that is kept, 0 to 1. `blocks_to_swap` blocks stream from the host (-1: as many as have to),
    `prefetch_blocks` of them are copied ahead; `pin_memory` says whether their host memory is page-locked.
    `offload_activations` keeps on the host what full checkpointing keeps of each block.
    """

    checkpointing: str = "full"
    attention: str = "auto"
    activation_budget: float = 0.5
    blocks_to_swap: int = 0
    prefetch_blocks: int = 1
    pin_memory: str = "auto"
    offload_activations: bool = False

    def __post_init__(self) -> None:
        _finite(self)
        _one_of("checkpointing", self.checkpointing, CHECKPOINTING)
        _one_of("attention", self.attention, ATTENTION)
        _within("activation_budget", self.activation_budget, 0.0, 1.0)
        if self.blocks_to_swap < -1:
            raise ValueError(
                f"blocks_to_swap is {self.blocks_to_swap}; set it to -1 (fit to the free memory), 0 (none) or more."
            )
        if self.prefetch_blocks < 1:
            raise ValueError(f"prefetch_blocks is {self.prefetch_blocks}; set it to 1 or more.")
        _one_of("pin_memory", self.pin_memory, PIN_MEMORY)

"""Options of optimizer, learning rate schedule, clipping and EMA."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...common.text import finite, one_of, within
from .lr_curve import Curve, parse_curve
from .registry import CUSTOM, OPTIMIZERS, OptimizerSpec, is_elementwise, package_of, parse_args

LR_SCHEDULERS = (
    *("constant", "cosine", "linear", "cosine_with_restarts", "polynomial", "warmup_stable_decay", "rex"),
    *("inverse_sqrt", "curve"),
)


@dataclass(frozen=True)
class OptimizerOptions:
    """Optimizer options (TESSERA_OPTIMIZER).

    optimizer: key of `registry.OPTIMIZERS`.
    learning_rate: peak learning rate, above 0.
    lr_scheduler: one of LR_SCHEDULERS, see `schedule.lr_factor`.
    warmup_steps: optimizer steps of linear warm-up, 0 is none.
    max_grad_norm: gradient norm limit, 0 turns clipping off.
    weight_decay: decoupled weight decay.
    beta1: decay of the first moment, below 1.
    beta2: decay of the second moment, below 1.
    eps: term in the denominator, above 0.
    min_lr_ratio: final learning rate as a fraction of the peak, 0 to 1.
    lr_cycles: cycles of cosine_with_restarts.
    lr_power: exponent of polynomial.
    lr_decay_part: fraction of the steps in which warmup_stable_decay decays.
    lr_curve: points of curve, see `lr_curve.parse_curve`.
    ema_decay: decay of the LoRA's EMA (`averaging.LoraAverage`), 0 is off.
    optimizer_class: dotted class name for optimizer 'custom'.
    optimizer_args: additional constructor arguments, one `key=value` per line (`registry.parse_args`).
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
        finite(self)
        one_of("optimizer", self.optimizer, tuple(OPTIMIZERS))
        one_of("lr_scheduler", self.lr_scheduler, LR_SCHEDULERS)
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
        self._check_schedule()
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay is {self.ema_decay}; set it to 0 (off) or more and below 1 (0.999 is usual).")
        _ = self.arguments
        if self.optimizer == CUSTOM:
            package_of(self.optimizer_class)
        if self.optimizer == "adamw_schedulefree":
            self._check_schedule_free()

    def _check_schedule(self) -> None:
        within("min_lr_ratio", self.min_lr_ratio, 0.0, 1.0)
        if self.lr_cycles < 1:
            raise ValueError(f"lr_cycles is {self.lr_cycles}; set it to 1 or more.")
        if self.lr_power <= 0:
            raise ValueError(f"lr_power is {self.lr_power}; set it above 0 (1 is a straight line).")
        if not 0 < self.lr_decay_part <= 1:
            raise ValueError(f"lr_decay_part is {self.lr_decay_part}; set it above 0 and to 1 at most.")
        if self.lr_scheduler == "curve":
            _ = self.curve

    def _check_schedule_free(self) -> None:
        if self.ema_decay:
            raise ValueError(
                f"ema_decay is {self.ema_decay} and adamw_schedulefree averages the weights by itself; set "
                "ema_decay to 0, or choose another optimizer."
            )
        if self.beta1 == 0:
            raise ValueError("beta1 is 0.0, by which adamw_schedulefree divides; set it above 0 (0.9 is usual).")

    @property
    def spec(self) -> OptimizerSpec:
        """Table row of the chosen optimizer; for 'custom' with the user's class."""
        row = OPTIMIZERS[self.optimizer]
        return replace(row, class_path=self.optimizer_class) if self.optimizer == CUSTOM else row

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The constructor arguments of `optimizer_args`. Raises ValueError for a line that can't be read."""
        return parse_args(self.optimizer_args)

    @cached_property
    def curve(self) -> Curve:
        """The points of `lr_curve`. Raises ValueError for points that make no curve."""
        return parse_curve(self.lr_curve)

    @property
    def is_elementwise(self) -> bool:
        """Return whether a step updates each element independently, so that weights in one tensor get equal steps."""
        return is_elementwise(self.spec.class_path, self.arguments)

    @property
    def display_name(self) -> str:
        """Name of the optimizer in messages and metadata: the chosen key, or the class name for 'custom'."""
        return self.optimizer_class if self.optimizer == CUSTOM else self.optimizer

"""What a training step moves: the LoRA's weights, the optimizer's state, the schedule and the average."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..lora.files.lora_model import LoraModel
from ..lora.network import LoraNetwork
from ..lora.warm_start import WarmStart
from .checkpoint.state import TrainingState
from .optim.averaging import LoraAverage, is_schedule_free, saved_weights
from .optim.max_norm import MaxNorm
from .optim.optimizers import build_optimizer, build_scheduler, restore_optimizer, state_of
from .optim.options import OptimizerOptions
from .optim.param_groups import parameter_groups


class Learner:
    """The trained weights of a run with all that steps them."""

    def __init__(self, network: LoraNetwork, options: OptimizerOptions, steps: int, dtype: torch.dtype, device: str):
        self.network, self.options = network, options
        plus = network.options.lora_plus_ratio
        named = dict(zip(network.master_weights(), network.parameters(), strict=True))
        self.optimizer = build_optimizer(options, parameter_groups(named, options.learning_rate, plus))
        self.scheduler = build_scheduler(options, self.optimizer, steps)
        self.average = LoraAverage(options.ema_decay, network.master_weights()) if options.ema_decay else None
        limit = network.options.scale_weight_norms
        self.max_norm = MaxNorm(limit, network.adapters.values()) if limit else None
        # fp16 gradients underflow; every other dtype has fp32's range.
        self.scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    def begin_from(self, start: WarmStart, read: Callable[[str], Tensor]) -> list[str]:
        """Takes the weights of another LoRA for the start; what of it is lost, a sentence each. read: gives a layer's
        frozen weight in fp32."""
        notes = start.load_into(self.network.adapters, read)
        if self.average is not None:
            self.average.load({})
        return notes

    @property
    def learning_rate(self) -> float:
        return float(self.scheduler.get_last_lr()[0])

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def clip(self) -> Tensor:
        """Clips the gradients; their norm before, on the device."""
        self.scaler.unscale_(self.optimizer)
        limit = self.options.max_grad_norm or math.inf
        return torch.nn.utils.clip_grad_norm_(self.network.parameters(), limit)

    def may_step(self, norm: float) -> bool:
        """Whether gradients of this norm may be stepped by: finite ones, or such as a smaller scale makes finite, with
        which `step` moves nothing."""
        return self.scaler.is_enabled() or math.isfinite(norm)

    def step(self) -> None:
        """Moves the weights by their gradients."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.max_norm is not None:
            self.max_norm.apply()
        if self.average is not None:
            self.average.update()
        self.scheduler.step()

    def facts(self) -> dict[str, object]:
        """Numbers for the summary."""
        return self.max_norm.facts() if self.max_norm is not None else {}

    @property
    def saves_other_weights(self) -> bool:
        """Whether what is saved is not what is stepped: an average, or what a schedule-free optimizer evaluates."""
        return self.average is not None or is_schedule_free(self.optimizer)

    def snapshot(self, as_saved: bool = True) -> LoraModel:
        """The LoRA as it would be saved now, on the host; else with the weights that are stepped."""
        if not as_saved:
            return self.network.snapshot()
        with self.as_saved():
            return self.network.snapshot()

    def as_saved(self) -> AbstractContextManager[None]:
        """Inside, the network's weights are those that would be saved; after it, bit for bit as they were."""
        return saved_weights(self.network.master_weights(), self.optimizer, self.average)

    def state(self) -> dict[str, Any]:
        """The fields of a TrainingState that are the learner's."""
        return {
            "masters": self.network.state_dict(),
            "adapters": self.network.specs(),
            "optimizer": state_of(self.optimizer),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": self.average.state() if self.average is not None else {},
        }

    def load(self, state: TrainingState) -> list[str]:
        """Goes on from a saved state; what the user should know of it, a sentence each."""
        self.network.load_master_weights(state.masters)
        restore_optimizer(self.optimizer, self.scheduler, state.optimizer, state.scheduler)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state.scaler)
        if self.average is None:
            return _average_left(state)
        self.average.load(state.average)
        if state.average:
            return []
        return [f"The state has no average of the LoRA, so it is taken from step {state.step} on."]


def _average_left(state: TrainingState) -> list[str]:
    if not state.average:
        return []
    return [
        f"The state has an average of the LoRA and ema_decay is 0, so the average ends at step {state.step}: what is "
        "saved from here on are the weights as they are trained. Set ema_decay on Optimizer to go on with it."
    ]

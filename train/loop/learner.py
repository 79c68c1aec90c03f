"""Trainable state of a run: LoRA weights, optimizer, learning rate schedule, gradient scaler and EMA."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ...lora.files.lora_model import LoraModel
from ...lora.network import LoraNetwork
from ...lora.warm_start import WarmStart
from ..checkpoint.state import TrainingState
from ..optim.averaging import LoraAverage, is_schedule_free, saved_weights
from ..optim.flat_step import FlatStep
from ..optim.max_norm import MaxNorm
from ..optim.optimizers import build_optimizer, build_scheduler, restore_optimizer, state_of
from ..optim.options import OptimizerOptions
from ..optim.param_groups import parameter_groups


class Learner:
    """LoRA network together with the optimizer, scheduler, gradient scaler, norm limit and EMA that update it."""

    def __init__(
        self,
        network: LoraNetwork,
        options: OptimizerOptions,
        steps: int,
        dtype: torch.dtype,
        device: str,
        flat_gradients: bool = False,
    ):
        """flat_gradients: join the gradients even if neither the optimizer nor the forward needs it."""
        self.network, self.options = network, options
        plus = network.options.lora_plus_ratio
        self.weights = network.parameters()
        weights_by_name = dict(zip(network.master_weights(), self.weights, strict=True))
        self.optimizer = build_optimizer(options, parameter_groups(weights_by_name, options.learning_rate, plus))
        self.flat: FlatStep | None = None
        if flat_gradients or options.is_elementwise or network.casts_in(dtype):
            groups = network.flatten([group["params"] for group in self.optimizer.param_groups], dtype)
            self.flat = FlatStep(self.optimizer, groups) if options.is_elementwise else None
        self.scheduler = build_scheduler(options, self.optimizer, steps)
        self.average = LoraAverage(options.ema_decay, network.master_weights()) if options.ema_decay else None
        limit = network.options.scale_weight_norms
        self.max_norm = MaxNorm(limit, network.adapters.values()) if limit else None
        # fp16 gradients underflow; every other dtype has fp32's range.
        self.scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    def apply_warm_start(self, start: WarmStart, read: Callable[[str], Tensor]) -> list[str]:
        """Initialise the weights from another LoRA.

        read: returns the frozen weight of a layer in fp32, (out, in).

        Returns one note for each part of that LoRA that could not be loaded.
        """
        notes = start.load_into(self.network.adapters, read)
        if self.average is not None:
            self.average.load({})  # restart the EMA from the new weights
        return notes

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step, of the first parameter group."""
        return float(self.scheduler.get_last_lr()[0])

    def zero_grad(self) -> None:
        """Free the gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        self.network.flat.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a loss, a scalar on the device, scaled in fp16."""
        self.scaler.scale(loss).backward()
        self.network.flat.gather()

    def clip(self) -> Tensor:
        """Clip the gradients and return their norm before clipping, as a scalar on the device.

        Call it before `step`, which uses the clipped gradients.
        """
        if self.flat is not None:
            self.flat.prepare()
        self.scaler.unscale_(self.optimizer)  # before clipping: max_grad_norm is meant for unscaled gradients
        limit = self.options.max_grad_norm or math.inf
        gradients = [p.grad for p in self.weights if p.grad is not None]
        # Over the weights, not the flat gradients: another order of summation would change the last bits.
        norm = torch.nn.utils.get_total_norm(gradients)
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grads_with_norm_(stepped, limit, norm)
        return norm

    def may_step(self, norm: float) -> bool:
        """Return whether the gradient norm is finite or the loss scaler is on.

        With the scaler on, `step` skips the update of infinite gradients and lowers the scale.
        """
        return self.scaler.is_enabled() or math.isfinite(norm)

    def step(self) -> None:
        """Update the weights from the clipped gradients, then apply the norm limit and update EMA and schedule."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # The norm limit comes before the average, so that the average is made of the limited weights.
        if self.max_norm is not None:
            self.max_norm.apply()
        if self.average is not None:
            self.average.update()
        self.scheduler.step()

    def facts(self) -> dict[str, object]:
        """Return entries for the run's summary."""
        return self.max_norm.facts() if self.max_norm is not None else {}

    @property
    def saves_other_weights(self) -> bool:
        """True if the saved weights differ from the trained ones: with an EMA or a schedule-free optimizer."""
        return self.average is not None or is_schedule_free(self.optimizer)

    def snapshot(self, as_saved: bool = True) -> LoraModel:
        """Copy the LoRA to the host.

        as_saved: take the weights that a file would hold (EMA or schedule-free evaluation weights), not the trained
            ones.
        """
        if not as_saved:
            return self.network.snapshot()
        with self.as_saved():
            return self.network.snapshot()

    def as_saved(self) -> AbstractContextManager[None]:
        """Return a context in which the network has the weights of a saved file; restores the others bit for bit."""
        return saved_weights(self.network.master_weights(), self.optimizer, self.average)

    def state(self) -> dict[str, Any]:
        """Return the learner's fields of a TrainingState."""
        return {
            "master_weights": self.network.state_dict(),
            "adapters": self.network.specs(),
            "optimizer": state_of(self.optimizer) if self.flat is None else self.flat.state(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": self.average.state() if self.average is not None else {},
        }

    def load(self, state: TrainingState) -> list[str]:
        """Restore a saved state. Returns notes for the user."""
        self.network.load_master_weights(state.master_weights)
        if self.flat is not None:
            self.flat.split()
        restore_optimizer(self.optimizer, self.scheduler, state.optimizer, state.scheduler)
        if self.flat is not None:
            self.flat.join()
        if self.scaler.is_enabled() and state.scaler:  # a state of another dtype has none
            self.scaler.load_state_dict(state.scaler)
        if self.average is None:
            return _average_left(state)
        self.average.load(state.average)
        if state.average:
            return []
        return [f"The state has no average of the LoRA, so averaging starts at step {state.step}."]


def _average_left(state: TrainingState) -> list[str]:
    if not state.average:
        return []
    return [
        f"The state has an average of the LoRA, but ema_decay is 0, so from step {state.step} on the plain weights "
        "are saved. To continue the average, set ema_decay on Optimizer."
    ]

"""Averages of the weights over the steps: EMA, and the evaluation weights of schedule-free optimizers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


def decay_at(update: int, decay: float) -> float:
    """Return the decay d of `LoraAverage` at an update, counted from 1."""
    return min(decay, (1 + update) / (10 + update))


class LoraAverage:
    """Exponential moving average (EMA) of a LoRA's fp32 weights w.

    Update t, counted from 1: ema ← d·ema + (1 − d)·w with d = min(decay, (1 + t) / (10 + t)). The smaller d of the
    first updates keeps the initial weights from dominating a short run. TensorFlow's ExponentialMovingAverage uses the
    same rule. diffusers' EMAModel is one update behind: its first d is 0, which copies w, and its second is our first.
    """

    def __init__(self, decay: float, master_weights: Mapping[str, Tensor]):
        self.decay, self.updates = decay, 0
        self.sources = dict(master_weights)
        self.master_weights = {name: tensor.clone() for name, tensor in master_weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average. Call it after each optimizer step."""
        self.updates += 1
        decay = decay_at(self.updates, self.decay)
        get_ema_multi_avg_fn(decay)(list(self.master_weights.values()), list(self.sources.values()), None)

    def state(self) -> dict[str, Any]:
        """Return the number of updates and the averages, for a training state."""
        return {"updates": self.updates, "masters": dict(self.master_weights)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. An empty one, of a run without EMA, restarts from the current weights."""
        self.updates = int(state.get("updates", 0))
        for name, tensor in self.master_weights.items():
            tensor.copy_(state["masters"][name] if state else self.sources[name])


def is_schedule_free(optimizer: torch.optim.Optimizer) -> bool:
    """Test for a schedule-free optimizer (Defazio et al. 2024, arXiv 2405.15682).

    It trains other weights than those it evaluates with; its methods `train` and `eval` swap the two.
    """
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


@contextmanager
def saved_weights(
    master_weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, average: LoraAverage | None
) -> Iterator[None]:
    """Context in which `master_weights` hold the weights to save: the EMA, or schedule-free evaluation weights.

    On exit the trained weights are restored from copies, bit for bit. `eval` followed by `train` leaves rounding
    errors, so that a run saved more often would give another result.
    """
    free = is_schedule_free(optimizer)
    if average is None and not free:
        yield
        return
    trained = {name: tensor.clone() for name, tensor in master_weights.items()}
    try:
        with torch.no_grad():
            if average is not None:
                for name, tensor in master_weights.items():
                    tensor.copy_(average.master_weights[name])
            else:
                optimizer.eval()  # type: ignore[attr-defined]
        yield
    finally:
        with torch.no_grad():
            if free:
                optimizer.train()  # type: ignore[attr-defined]
            for name, tensor in master_weights.items():
                tensor.copy_(trained[name])

"""Which weights a LoRA is saved with, where they are not those that are trained: averages over the steps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


def decay_at(update: int, decay: float) -> float:
    """d of `LoraAverage` at this update, counted from 1."""
    return min(decay, (1 + update) / (10 + update))


class LoraAverage:
    """The exponential moving average of a LoRA's masters.

    After update t (counted from 1) ema ← d·ema + (1 − d)·master with d = min(decay, (1 + t) / (10 + t)), so that a
    short run is not held at its start: the rule of TensorFlow's ExponentialMovingAverage and of diffusers' EMAModel.
    """

    def __init__(self, decay: float, masters: Mapping[str, Tensor]):
        self.decay, self.updates = decay, 0
        self.sources = dict(masters)
        self.masters = {name: tensor.clone() for name, tensor in masters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Takes the masters in as they are after a step."""
        self.updates += 1
        decay = decay_at(self.updates, self.decay)
        get_ema_multi_avg_fn(decay)(list(self.masters.values()), list(self.sources.values()), None)

    def state(self) -> dict[str, Any]:
        return {"updates": self.updates, "masters": dict(self.masters)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state; from an empty one, of a run without the average, it starts at the masters."""
        self.updates = int(state.get("updates", 0))
        for name, tensor in self.masters.items():
            tensor.copy_(state["masters"][name] if state else self.sources[name])


def is_schedule_free(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it steps other weights than those that are meant to be used, with `train` and `eval` to change between
    them (Defazio et al. 2024, arXiv 2405.15682)."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


@contextmanager
def saved_weights(
    masters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, average: LoraAverage | None
) -> Iterator[None]:
    """Inside, the masters are what is to be saved: the average, or what a schedule-free optimizer evaluates with.

    After it they are bit for bit as they were: `eval` and `train` alone would leave rounding behind, and a run that is
    saved more often would learn something else.
    """
    free = is_schedule_free(optimizer)
    if average is None and not free:
        yield
        return
    kept = {name: tensor.clone() for name, tensor in masters.items()}
    try:
        with torch.no_grad():
            if average is not None:
                for name, tensor in masters.items():
                    tensor.copy_(average.masters[name])
            else:
                optimizer.eval()  # type: ignore[attr-defined]
        yield
    finally:
        with torch.no_grad():
            if free:
                optimizer.train()  # type: ignore[attr-defined]
            for name, tensor in masters.items():
                tensor.copy_(kept[name])

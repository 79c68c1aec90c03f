"""The optimizer and its learning-rate schedule, both from libraries."""

import importlib
import math
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from .options import OptimizerOptions

_SETTINGS = ("initial_lr", "betas", "eps", "weight_decay")
PRODIGY_USUAL_RATE = 0.1


def build_optimizer(options: OptimizerOptions, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The chosen optimizer over `params`.

    adamw: torch. adamw8bit: bitsandbytes, moments in 8 bits by blocks of 256 (tensors under 4096 elements stay fp32).
    prodigy: prodigyopt, with bias correction and the guard for warm-up, as its authors advise for diffusion models.
    Raises ValueError where the library is missing or does not run on this machine.
    """
    params = list(params)
    common: dict[str, Any] = {
        "lr": options.learning_rate,
        "betas": (options.beta1, options.beta2),
        "eps": options.eps,
        "weight_decay": options.weight_decay,
    }
    if options.optimizer == "adamw8bit":
        adamw8bit = _library("adamw8bit", "bitsandbytes").optim.AdamW8bit
        _try_a_step(adamw8bit, params[0].device)
        return adamw8bit(params, **common)
    if options.optimizer == "prodigy":
        return _library("prodigy", "prodigyopt").Prodigy(
            params, **common, use_bias_correction=True, safeguard_warmup=True
        )
    assert options.optimizer == "adamw", options.optimizer
    return torch.optim.AdamW(params, **common)


def build_scheduler(options: OptimizerOptions, optimizer: torch.optim.Optimizer, total_steps: int) -> LambdaLR:
    """The schedule of the learning rate; call its `step` once after each step of the optimizer.

    total_steps: steps of the optimizer in the whole run, not of this session.
    The rate is a closed formula of the step, so that a resumed run has the same rates bit for bit.
    """
    return LambdaLR(optimizer, lr_factor(options, total_steps))


def lr_factor(options: OptimizerOptions, total_steps: int) -> Callable[[int], float]:
    """What the learning rate is multiplied by at a step, counted from 0.

    Warm-up of w steps: (step + 1) / w, so that the first step moves already. After it, with r = `min_lr_ratio` and
    p = (step − w) / (total − w): constant 1; linear 1 − (1 − r)·p; cosine r + (1 − r)·(1 + cos(π·p)) / 2
    (Loshchilov & Hutter 2017, arXiv 1608.03983, eq. 5).
    """
    warmup, low = options.warmup_steps, options.min_lr_ratio
    if warmup >= total_steps:
        raise ValueError(
            f"warmup_steps is {warmup} and the run has {total_steps} steps; set warmup_steps below {total_steps}."
        )

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if options.lr_scheduler == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / (total_steps - warmup))
        if options.lr_scheduler == "linear":
            return 1.0 - (1.0 - low) * progress
        assert options.lr_scheduler == "cosine", options.lr_scheduler
        return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
    optimizer_state: dict[str, Any],
    scheduler_state: dict[str, Any],
) -> None:
    """Puts a saved state back under the settings that the optimizer was built with now.

    torch's own loading brings the saved rates, betas and weight decay along, so that a change of them would be accepted
    and ignored. What an optimizer has learnt (moments, Prodigy's estimate) is kept; the rate is that of the schedule as
    it is now, at the step of the state.
    """
    settings = [{name: group[name] for name in _SETTINGS if name in group} for group in optimizer.param_groups]
    bases = list(scheduler.base_lrs)
    optimizer.load_state_dict(optimizer_state)
    scheduler.load_state_dict(scheduler_state)
    scheduler.base_lrs = bases
    for group, kept, base, factor in zip(optimizer.param_groups, settings, bases, scheduler.lr_lambdas, strict=True):
        group.update(kept)
        group["lr"] = base * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def optimizer_notes(options: OptimizerOptions) -> tuple[str, ...]:
    """What a user may not expect of these options, a sentence each."""
    notes = []
    if options.optimizer == "prodigy" and options.learning_rate < PRODIGY_USUAL_RATE:
        notes.append(f"Prodigy scales its own rate; learning_rate 1 is usual, and {options.learning_rate:g} slows it.")
    if options.optimizer != "prodigy" and options.learning_rate >= PRODIGY_USUAL_RATE:
        notes.append(f"learning_rate is {options.learning_rate:g}; 1e-4 is usual for {options.optimizer}.")
    if options.lr_scheduler == "constant" and options.min_lr_ratio > 0:
        notes.append("min_lr_ratio is not used by the constant schedule.")
    return tuple(notes)


def _library(optimizer: str, package: str) -> ModuleType:
    """A package that ComfyUI does not bring, imported when it is chosen."""
    try:
        return importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(
            f"The optimizer {optimizer} needs the package {package}, which cannot be imported here ({error}); install "
            f"it with 'pip install {package}' in ComfyUI's Python, or choose adamw."
        ) from error


def _try_a_step(adamw8bit: Callable[..., torch.optim.Optimizer], device: torch.device) -> None:
    """One step on a small tensor: a build without a kernel for the device says so now, not after encoding."""
    probe = nn.Parameter(torch.zeros(4096, device=device))
    probe.grad = torch.ones_like(probe)
    try:
        adamw8bit([probe], lr=1.0).step()
        moved = bool((probe.detach() < 0).all())
    except (RuntimeError, NotImplementedError, AttributeError, AssertionError) as error:
        raise _no_8bit(device, f"{type(error).__name__}: {error}") from error
    if not moved:
        raise _no_8bit(device, "a step left the weights as they were")


def _no_8bit(device: torch.device, reason: str) -> ValueError:
    return ValueError(
        f"The optimizer adamw8bit does not run on {device} with the bitsandbytes installed here ({reason}); update it "
        "with 'pip install -U bitsandbytes' in ComfyUI's Python, or choose adamw."
    )

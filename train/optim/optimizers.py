"""Construction and restoring of optimizers (all from libraries) and of the learning rate schedule."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from .averaging import is_schedule_free
from .options import OptimizerOptions
from .param_groups import check_groups, flat, group_sizes
from .registry import arguments, check_args, fused_by_default, optimizer_class
from .schedule import lr_factor


def build_optimizer(
    options: OptimizerOptions, params: Iterable[nn.Parameter | dict[str, Any]]
) -> torch.optim.Optimizer:
    """Build the chosen optimizer.

    params: parameters, or parameter groups with their own learning rates.

    Raises ValueError if the library is missing, rejects an argument, or does not run on this machine.
    """
    params = list(params)
    values = check_arguments(options)
    kind: Callable[..., torch.optim.Optimizer] = chosen_class(options)
    device = flat(params)[0].device
    if options.optimizer == "adamw8bit":
        _try_a_step(kind, device)
    values |= fused_by_default(options.spec.class_path, values, device)
    try:
        optimizer = kind(params, lr=options.learning_rate, **values)
    except Exception as error:  # a library's own checks
        cause = "these optimizer_args" if options.arguments else "these settings"
        name, text = options.display_name, _one_line(error)
        raise ValueError(f"The optimizer {name} does not take {cause} or this network: {text}") from error
    if is_schedule_free(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def check_arguments(options: OptimizerOptions) -> dict[str, Any]:
    """Check and return the keyword arguments of the chosen class, without the learning rate.

    Raises ValueError if its library is missing or rejects an argument.
    """
    inputs = {
        "betas": (options.beta1, options.beta2),
        "eps": options.eps,
        "weight_decay": options.weight_decay,
    }
    spec = options.spec
    values = {key: inputs[key] for key in spec.takes} | dict(spec.fixed) | options.arguments
    check_args(options.display_name, chosen_class(options), values)
    return values


def chosen_class(options: OptimizerOptions) -> type[torch.optim.Optimizer]:
    """Import the class of the chosen optimizer. Raises ValueError if its library is missing."""
    return optimizer_class(options.display_name, options.spec.class_path)


def build_scheduler(options: OptimizerOptions, optimizer: torch.optim.Optimizer, total_steps: int) -> LambdaLR:
    """Build the learning rate schedule. Call its `step` once after each optimizer step.

    total_steps: optimizer steps of the run, earlier sessions included.

    The rate is a closed formula of the step, so that a resumed run has the same rates bit for bit.
    """
    return LambdaLR(optimizer, lr_factor(options, total_steps))


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state dict with the name of its class."""
    return {**optimizer.state_dict(), "class": _class_name(type(optimizer))}


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
    optimizer_state: dict[str, Any],
    scheduler_state: dict[str, Any],
) -> None:
    """Restore a saved state but retain the current hyperparameters.

    torch's `load_state_dict` also restores learning rates, betas and weight decay, and a changed setting would be
    silently ignored. Here only the learnt state (moments, Prodigy's estimate) is restored. Constructor arguments
    stay as they are now, and the rate is that of the current schedule at the state's step.

    Raises ValueError if the state belongs to another optimizer or to other parameter groups.
    """
    check_class(optimizer_state["class"], type(optimizer))
    # Constructor arguments in a group are settings. Other entries (step counts, estimates) are learnt state.
    made_with = {"initial_lr", *arguments(type(optimizer))}
    settings = [
        {name: value for name, value in g.items() if name in made_with - {"params"}} for g in optimizer.param_groups
    ]
    bases = list(scheduler.base_lrs)
    check_groups(group_sizes(optimizer.param_groups), group_sizes(optimizer_state["param_groups"]))
    # An older library saved fewer entries per group. Saved settings are not passed to torch, which reads some of them.
    group_states = zip(optimizer.param_groups, optimizer_state["param_groups"], settings, strict=True)
    groups = [group | saved | current for group, saved, current in group_states]
    optimizer.load_state_dict({**optimizer_state, "param_groups": groups})
    # A closed formula needs only the step. Anything else in a state would replace attributes of the scheduler.
    step = scheduler_state["last_epoch"]
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": step, "_step_count": step + 1})
    for group, current, base, factor in zip(optimizer.param_groups, settings, bases, scheduler.lr_lambdas, strict=True):
        group.update(current)
        group["lr"] = base * factor(scheduler.last_epoch)
    # Private, but `get_last_lr` reads it, and load_state_dict has set it to the saved rates.
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def check_class(saved: str, optimizer_type: type[torch.optim.Optimizer]) -> None:
    """Raise ValueError if a saved state belongs to another optimizer.

    saved: class name in the state.
    optimizer_type: class of this run's optimizer.
    """
    if saved != _class_name(optimizer_type):
        raise ValueError(
            f"resume: that state is of the optimizer {saved} and this run has {_class_name(optimizer_type)}; set the "
            "optimizer as it was, or set resume to 'off'."
        )


def _class_name(kind: type[torch.optim.Optimizer]) -> str:
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return f"{text}."


def _try_a_step(adamw8bit: Callable[..., torch.optim.Optimizer], device: torch.device) -> None:
    """Run one step on a small tensor, so that a build without a kernel for the device fails before training.

    Raises ValueError if the step fails or changes nothing.
    """
    # 4096 elements: bitsandbytes quantises the moments of tensors from that size on.
    probe = nn.Parameter(torch.zeros(4096, device=device))
    probe.grad = torch.ones_like(probe)
    try:
        adamw8bit([probe], lr=1.0).step()
        weights_changed = bool((probe.detach() < 0).all())
    except (RuntimeError, NotImplementedError, AttributeError, AssertionError) as error:
        raise _no_8bit(device, f"{type(error).__name__}: {error}") from error
    if not weights_changed:
        raise _no_8bit(device, "a step left the weights as they were")


def _no_8bit(device: torch.device, reason: str) -> ValueError:
    return ValueError(
        f"The optimizer adamw8bit does not run on {device} with the bitsandbytes installed here ({reason}); update it "
        "with 'pip install -U bitsandbytes' in ComfyUI's Python, or choose adamw."
    )

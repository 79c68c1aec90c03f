"""Checks and notes on an optimizer before a model is loaded."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ...common.rng import generator
from ...lora.options import NetworkOptions
from ...models.adapters.base import AdapterSpec, Shape
from ...models.adapters.registry import ADAPTERS
from .averaging import is_schedule_free
from .optimizers import build_optimizer, build_scheduler, restore_optimizer, state_of
from .options import OptimizerOptions
from .param_groups import Params, check_ratio, flat, parameter_groups
from .schedule import INVERSE_SQRT_STEPS
from .state_dict import pack_state, unpack_state

PRODIGY_USUAL_RATE = 0.1
_Running = tuple[torch.optim.Optimizer, LambdaLR]


def check_optimizer(
    options: OptimizerOptions, device: torch.device, network: NetworkOptions | None = None
) -> tuple[str, ...]:
    """Try the optimizer on a small LoRA. Returns notes on its unexpected effects, one sentence each.

    Raises ValueError if it cannot be built, cannot step from gradients alone, or cannot be saved.
    """
    network = network or NetworkOptions()
    check_ratio(ratio := network.lora_plus_ratio, options)
    shapes, kind = _small_adapter(network), ADAPTERS[network.algorithm]
    if options.optimizer == "muon" and any(len(shape) != 2 for shape in shapes.values()):
        raise ValueError(
            f"muon trains matrices only, and {network.algorithm} trains {kind.unlike_matrices}; choose "
            "another optimizer, such as adamw, or another algorithm."
        )
    whole = _small_weights(shapes, device, options.learning_rate, ratio)
    optimizer = build_optimizer(options, whole)
    if options.ema_decay and is_schedule_free(optimizer):
        raise _averages_itself(options)
    if network.scale_weight_norms and is_schedule_free(optimizer):
        raise _keeps_weights(options, network.scale_weight_norms)
    name = options.display_name
    scheduler = build_scheduler(options, optimizer, options.warmup_steps + 4)
    try:
        for k in range(3):
            _step(flat(whole), optimizer, scheduler, k)
        tensors, tree = pack_state({"optimizer": state_of(optimizer), "scheduler": scheduler.state_dict()})
    except Exception as error:  # any library error: it needs a closure, sparse gradients or other hardware
        plus = "" if ratio == 1 else f" with lora_plus_ratio {ratio:g}"
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        fix = "change optimizer_args" if options.optimizer_args.strip() else "choose another one, such as adamw"
        raise ValueError(f"The optimizer {name} cannot train a LoRA here{plus} ({reason}); {fix}.") from error
    notes = optimizer_notes(options)
    if options.optimizer == "custom" and is_schedule_free(optimizer) and options.lr_scheduler != "constant":
        notes += (_needs_no_schedule(name, options.lr_scheduler),)
    if not _goes_on_alike(options, whole, unpack_state(tensors, tree), (optimizer, scheduler)):
        notes += (f"{name} can't save its complete state, so a resumed run continues a little differently.",)
    return notes


def _small_adapter(network: NetworkOptions) -> dict[str, Shape]:
    """Return the shapes of one layer's master weights, large enough for 8-bit moments."""
    spec = AdapterSpec(network.algorithm, 16, 16.0)
    return {f"probe.{name}": shape for name, shape in ADAPTERS[spec.algorithm].shapes(spec, 256, 256).items()}


def _small_weights(shapes: dict[str, Shape], device: torch.device, learning_rate: float, ratio: float) -> Params:
    """Make random weights of these shapes, in LoRA+'s parameter groups."""
    draws = (torch.randn(s, generator=generator(0, "probe", i)) for i, s in enumerate(shapes.values()))
    weights = {name: nn.Parameter(0.1 * draw.to(device)) for name, draw in zip(shapes, draws, strict=True)}
    return parameter_groups(weights, learning_rate, ratio)


def _step(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, scheduler: LambdaLR, k: int) -> None:
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=generator(0, "probe", k, i)).to(p.device)
    optimizer.step()
    scheduler.step()


def _goes_on_alike(options: OptimizerOptions, whole: Params, state: dict[str, Any], running: _Running) -> bool:
    """Test that a step after a resume gives the same weights as the step without a resume."""
    resumed = _copied(whole)
    optimizer = build_optimizer(options, resumed)
    scheduler = build_scheduler(options, optimizer, options.warmup_steps + 4)
    try:
        restore_optimizer(optimizer, scheduler, state["optimizer"], state["scheduler"])
        _step(flat(resumed), optimizer, scheduler, 3)
    except Exception:  # a library that cannot load its own state
        return False
    _step(flat(whole), *running, k=3)
    return all(_is_equal(a, b) for a, b in zip(flat(whole), flat(resumed), strict=True))


def _copied(params: Params) -> Params:
    """Copy parameters in the same groups."""

    def copy(p: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(p.detach().clone())

    return [
        entry | {"params": [copy(p) for p in entry["params"]]} if isinstance(entry, dict) else copy(entry)
        for entry in params
    ]


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def _averages_itself(options: OptimizerOptions) -> ValueError:
    return ValueError(
        f"ema_decay is {options.ema_decay} and {options.optimizer_class} averages the weights by itself; set ema_decay "
        "to 0, or choose another optimizer."
    )


def _keeps_weights(options: OptimizerOptions, limit: float) -> ValueError:
    name = options.display_name
    return ValueError(
        f"scale_weight_norms is {limit:g} and {name} keeps a second copy of the weights, which would not be scaled; "
        "set scale_weight_norms to 0, or choose another optimizer."
    )


def optimizer_notes(options: OptimizerOptions) -> tuple[str, ...]:
    """Make notes for the user on options with unusual effects."""
    name = options.optimizer
    notes = []
    if rate_note := _rate_note(name, options.learning_rate):
        notes.append(rate_note)
    if name == "adamw_schedulefree" and options.lr_scheduler != "constant":
        notes.append(_needs_no_schedule(name, options.lr_scheduler))
    if options.lr_scheduler == "inverse_sqrt" and options.warmup_steps == 0:
        notes.append(f"inverse_sqrt without warmup_steps falls slowly: to 0.71 after {INVERSE_SQRT_STEPS} steps.")
    return tuple(notes)


def _rate_note(name: str, rate: float) -> str:
    """Return a sentence on a learning rate that is unusual for the optimizer; empty for a usual one."""
    if name == "custom":
        return ""
    if name == "prodigy":
        slow = rate < PRODIGY_USUAL_RATE
        return f"Prodigy scales its own rate; learning_rate 1 is usual, and {rate:g} slows it." if slow else ""
    if rate >= PRODIGY_USUAL_RATE:
        return f"learning_rate is {rate:g}; 1e-4 is usual for {name}."
    if name == "lion" and rate >= 1e-4:
        return f"learning_rate is {rate:g}; Lion takes a third to a tenth of AdamW's rate, about 2e-5."
    return ""


def _needs_no_schedule(name: str, scheduler: str) -> str:
    return f"{name} needs no schedule; constant is usual, and {scheduler} slows it."

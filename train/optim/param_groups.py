"""Parameter groups for LoRA+: a separate learning rate for the up matrices (arXiv 2402.12354)."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .options import OptimizerOptions

UP = ".up"
Params = list[nn.Parameter | dict[str, Any]]


def parameter_groups(named: Mapping[str, nn.Parameter], learning_rate: float, ratio: float) -> Params:
    """Make the parameter groups of an optimizer.

    named: trained weights by `<module>.down`, `<module>.up` and so on.

    With λ = `ratio` the matrices B (`up`) train at λ·learning_rate and all others at learning_rate (Hayou et al. 2024,
    arXiv 2402.12354, section 4.1). The schedule scales both. λ = 1 gives a plain list of parameters.
    """
    if ratio == 1:
        return list(named.values())
    ups = {name: p for name, p in named.items() if name.endswith(UP)}
    others = [p for name, p in named.items() if name not in ups]
    return [{"params": others}, {"params": list(ups.values()), "lr": ratio * learning_rate}]


def flat(params: Sequence[nn.Parameter | dict[str, Any]]) -> list[nn.Parameter]:
    """Flatten parameter groups, or a plain list, to a list of parameters."""
    return [p for one in params for p in (one["params"] if isinstance(one, dict) else (one,))]


def check_ratio(ratio: float, options: OptimizerOptions) -> None:
    """Raise ValueError where LoRA+ is set for an optimizer that supports one learning rate only."""
    if ratio != 1 and options.optimizer == "prodigy":
        raise ValueError(
            f"lora_plus_ratio is {ratio:g} and prodigy has one rate for all weights; set lora_plus_ratio to 1, or "
            "choose another optimizer."
        )


def group_sizes(params: Sequence[nn.Parameter | dict[str, Any]]) -> list[int]:
    """Count the parameters of each group; a plain list is one group."""
    groups = [one for one in params if isinstance(one, dict)]
    return [len(group["params"]) for group in groups] if groups else [len(params)]


def check_groups(now: Sequence[int], saved: Sequence[int]) -> None:
    """Raise ValueError where a saved optimizer state has other parameter groups.

    now, saved: number of parameters of each group.
    """
    if list(now) != list(saved):
        raise ValueError(
            f"resume: that state was trained {'without' if len(saved) == 1 else 'with'} LoRA+; set lora_plus_ratio "
            f"{'to 1' if len(saved) == 1 else 'to another number than 1'}, or set resume to 'off'."
        )

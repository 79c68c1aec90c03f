"""Parameter groups for LoRA+: a separate learning rate for the up matrices (arXiv 2402.12354)."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .options import OptimizerOptions

UP = ".up"
Params = list[nn.Parameter | dict[str, Any]]


def parameter_groups(parameters: Mapping[str, nn.Parameter], learning_rate: float, ratio: float) -> Params:
    """Make the parameter groups of an optimizer.

    parameters: trained weights by `<module>.down`, `<module>.up` and so on.

    With λ = `ratio` the matrices B (`up`) train at λ·learning_rate and all others at learning_rate (Hayou et al. 2024,
    arXiv 2402.12354, section 4.1). The schedule scales both. λ = 1 gives a plain list of parameters.
    """
    if ratio == 1:
        return list(parameters.values())
    ups = {name: p for name, p in parameters.items() if name.endswith(UP)}
    remaining = [p for name, p in parameters.items() if name not in ups]
    return [{"params": remaining}, {"params": list(ups.values()), "lr": ratio * learning_rate}]


def flat(params: Sequence[nn.Parameter | dict[str, Any]]) -> list[nn.Parameter]:
    """Flatten parameter groups, or a plain list, to a list of parameters."""
    return [p for entry in params for p in (entry["params"] if isinstance(entry, dict) else (entry,))]


def check_ratio(ratio: float, options: OptimizerOptions) -> None:
    """Raise ValueError if LoRA+ is set for an optimizer that supports only one learning rate."""
    if ratio != 1 and options.optimizer == "prodigy":
        raise ValueError(
            f"lora_plus_ratio is {ratio:g} and prodigy has one rate for all weights; set lora_plus_ratio to 1, or "
            "choose another optimizer."
        )


def group_sizes(params: Sequence[nn.Parameter | dict[str, Any]]) -> list[int]:
    """Count the parameters of each group; a plain list is one group."""
    groups = [entry for entry in params if isinstance(entry, dict)]
    return [len(group["params"]) for group in groups] if groups else [len(params)]


def check_groups(current_sizes: Sequence[int], saved_sizes: Sequence[int]) -> None:
    """Raise ValueError if a saved optimizer state has other parameter groups.

    current_sizes, saved_sizes: number of parameters of each group.
    """
    if list(current_sizes) != list(saved_sizes):
        raise ValueError(
            f"resume: that state was trained {'without' if len(saved_sizes) == 1 else 'with'} LoRA+; set "
            f"lora_plus_ratio {'to 1' if len(saved_sizes) == 1 else 'to another number than 1'}, "
            "or set resume to 'off'."
        )

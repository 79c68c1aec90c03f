"""Checks of a run on a slider or an erasure."""

from collections.abc import Sequence

from ...data.samples import ERASURE, PICTURE_SLIDER, SLIDER, Sample
from ...models.adapters.registry import algorithms_with
from ..config.settings import TrainSettings

_COSTS = {
    SLIDER: "A slider runs the model three times without the LoRA and twice with it per step.",
    ERASURE: "An erasure runs the model up to twice without the LoRA and once with it per step.",
    PICTURE_SLIDER: "A slider from pictures runs the model twice without the LoRA and twice with it per step.",
}


def check_concept(settings: TrainSettings, samples: Sequence[Sample]) -> tuple[str, ...]:
    """Make a note on what a concept costs. Raises ValueError for settings that do not go with it."""
    concept = next((sample.concept for sample in samples if sample.concept), "")
    if not concept:
        return ()
    objective = settings.objective
    for name, is_on in (
        ("preservation_weight", objective.preservation_weight),
        ("guidance_loss_scale", objective.guidance_loss_scale),
    ):
        if is_on:
            raise ValueError(
                f"{name} is {is_on:g} and data is for {concept}, which has a target of its own; set {name} to 0."
            )
    if settings.validation is not None:
        raise ValueError(
            f"validation measures how well pictures are learnt and data is for {concept}, which learns none; "
            "disconnect validation."
        )
    if concept != ERASURE and not settings.network.kind.odd_in:
        network = settings.network
        kind = network.algorithm if network.kind.init == "" else f"{network.algorithm} with init {network.init}"
        raise ValueError(
            f"algorithm is {kind}, whose change does not turn with its strength, as a slider needs; set algorithm on "
            f"LoRA Network to {' or '.join(algorithms_with('odd_in'))}, and init to kaiming."
        )
    return (_COSTS[concept],)

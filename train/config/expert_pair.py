"""Pair of Wan 2.2 experts: check that two models belong together and find their boundary sigma."""

from comfy.model_patcher import ModelPatcher

from ...models.blocks import linear_shapes
from ...models.catalogue.registry import family_of

HIGH, LOW = "high_noise", "low_noise"
SAME_WEIGHTS = (
    "model and model_low_noise are the same weights; connect the high noise expert to model and the low noise "
    "expert to model_low_noise."
)


def meeting_sigma(high: ModelPatcher, low: ModelPatcher) -> float:
    """Return the boundary sigma between the two experts of one Wan 2.2 model.

    Raises ValueError if the two models are not such a pair.
    """
    family, other = family_of(high), family_of(low)
    if family.name != other.name or family.variant(high.model) != other.variant(low.model):
        raise ValueError(
            f"model is {family.title} ({family.variant(high.model)}) and model_low_noise is {other.title} "
            f"({other.variant(low.model)}); connect the two experts of one Wan 2.2 model."
        )
    if (boundary := family.sampling.expert_boundary(high.model)) is None:
        raise ValueError(
            f"model_low_noise is for Wan 2.2's second expert, and model is {family.title} "
            f"({family.variant(high.model)}), which has none; disconnect it."
        )
    if linear_shapes(high.model) != linear_shapes(low.model):
        raise ValueError(
            "model and model_low_noise are Wan models of different size; connect the two experts of one Wan 2.2 model."
        )
    return boundary

"""The family of every MODEL that none of our own families matches: it trains on ComfyUI's own forward."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...memory.low_bit.quantize import AS_STORED
from ...memory.weights.frozen import FrozenWeights
from ..blocks import find_blocks, lists_of, numbered
from ..family import (
    ConditioningFacts,
    Family,
    ModelInputs,
    NoisySample,
    Origin,
    Patches,
    SampleFacts,
    SamplingFacts,
    TrainingForward,
    Transformer,
)
from ..latents import policy_of_format
from ..layers.attention import attention_function
from .comfyui.leftovers import as_loaded
from .facts.lookup import facts_of, is_tested, named_facts
from .facts.model_facts import ModelFacts
from .facts.untrained import why_untrained
from .forward.inputs import native_inputs, patchify
from .forward.shadow import Shadow
from .forward.transformer import ForwardRecord, NativeTransformer
from .names import native_names, origin_of
from .objective import SamplingObjective, default_shift, objective_of
from .verify.checks import NativeChecks


@dataclass(frozen=True, kw_only=True)
class NativeSampling(SamplingFacts):
    """Latents and noise levels as ComfyUI's model has them."""

    facts: ModelFacts

    def objective(self, patcher: ModelPatcher) -> SamplingObjective:
        return objective_of(patcher)

    def shift(self, model: Any, tokens: int) -> float:
        return default_shift(model) if self.facts.shift is None else self.facts.shift


class NativeConditioning(ConditioningFacts):
    """Inputs as ComfyUI's configuration of the model has them; only the first forward shows whether captions fit."""

    def takes_guidance(self, model: Any) -> bool:
        return bool(model.model_config.unet_config.get("guidance_embed"))

    def text_width(self, model: Any) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class NativeForward(TrainingForward):
    """ComfyUI's own forward, with hooks around its blocks.

    facts: facts of the model.
    conditioning: inputs that the model takes besides text.
    record: what the forwards of the run have shown.
    """

    facts: ModelFacts
    conditioning: ConditioningFacts
    record: ForwardRecord = field(default_factory=ForwardRecord)

    def block_lists(self, model: Any) -> dict[str, int]:
        return {name: len(members) for name, members in lists_of(find_blocks(model.diffusion_model)).items()}

    def build(
        self,
        patcher: ModelPatcher,
        device: torch.device,
        compute_dtype: torch.dtype,
        attention: str,
        on_host: frozenset[str] = frozenset(),
        quantize: str = AS_STORED,
        in_zeros: bool = False,
    ) -> Transformer:
        blocks = numbered(find_blocks(patcher.model.diffusion_model))
        swapped = frozenset(blocks[name].name for name in on_host)
        block_names = frozenset(block.name for block in blocks.values())
        weights = FrozenWeights(patcher, device, compute_dtype, swapped, quantize, block_names, in_zeros)
        attend = attention_function(attention, device, compute_dtype)
        return NativeTransformer(self.title, Shadow(patcher, weights), blocks, attend, compute_dtype, self.record)

    def training(self, transformer: Transformer) -> AbstractContextManager[None]:
        assert isinstance(transformer, NativeTransformer)
        return transformer.training()

    def patchify(self, latent: Tensor, keep: int) -> Patches:
        return patchify(latent, keep)

    def inputs(
        self, patcher: ModelPatcher, samples: Sequence[NoisySample], sigma: Tensor, guidance: float
    ) -> ModelInputs:
        # A model that was not distilled interprets it differently, like Chroma, or ignores it.
        distilled = self.conditioning.takes_guidance(patcher.model)
        facts = self.facts
        return native_inputs(
            patcher, samples, sigma, guidance if distilled else None, sound=facts.sound, batches=facts.batches
        )


class NativeFamily(Family):
    """The family of one MODEL, to which it keeps no reference."""

    own_forward = False
    whole_grids = True
    conditioning = NativeConditioning()

    def __init__(self, model: Any):
        """Read the model's facts. Raises ValueError, with the reason, for a model that can't be trained."""
        if (untrained := why_untrained(model)) is not None:
            name, cause = untrained
            raise ValueError(f"model is {name}, which Train LoRA can't train ({cause}); connect another MODEL.")
        if (reason := _cannot_train(model)) is not None:
            raise ValueError(f"model is a {type(model).__name__}, which Train LoRA cannot train: {reason}.")
        self.facts = facts_of(model)
        self.title = self.facts.title
        self.tested_by_name = is_tested(model)
        # One without a row may have a class of our families, with another forward.
        self.name = f"native-{self.facts.name}" if named_facts(model) is None else self.facts.name
        self.model_class = type(model)
        self.names = native_names(model)
        self.default_targets = self.facts.default_targets
        self.usual = self.facts.usual
        policy = self.facts.latents or policy_of_format(self.title, model.latent_format)
        self.sampling = NativeSampling(policy, facts=self.facts)
        swap_order = tuple(lists_of(find_blocks(model.diffusion_model)))
        self.forward = NativeForward(self.title, swap_order, facts=self.facts, conditioning=self.conditioning)
        self.checks = NativeChecks(self.title, self.facts.batches)

    @property
    def pictures_only(self) -> bool:
        return False

    def fits_data(self, text_family: str) -> bool:
        """Return True: only the first forward shows whether the data fits."""
        return True

    def matches(self, model: Any) -> bool:
        return type(model) is self.model_class

    def as_loaded(self, model: Any) -> Any:
        return as_loaded(model)

    def origin(self, model: Any) -> Origin:
        return origin_of(model, self.name)

    def check(self, model: Any, sample: SampleFacts) -> None:
        if sample.frames > 1 and model.latent_format.latent_dimensions == 2:
            raise ValueError(f"{sample.name} is a clip of {sample.frames} frames; {self.title} trains on pictures.")
        if sample.clean_frames:
            raise ValueError(
                f"{sample.name} gives its first frame without noise, which {self.title} is not trained with; switch "
                "image_to_video off in Prepare Dataset."
            )

    def notes(self, model: Any, samples: Sequence[SampleFacts]) -> list[str]:
        return self.facts.remarks()

    def distillation_notes(self, model: Any) -> list[str]:
        return self.facts.distillation_notes()


def _cannot_train(model: Any) -> str | None:
    if not isinstance(getattr(model, "diffusion_model", None), torch.nn.Module):
        return "it isn't a diffusion model"
    if model.latent_format.latent_dimensions == 1:
        return "it doesn't make pictures or video"
    if not find_blocks(model.diffusion_model):
        return "it has no blocks of one structure"
    return None

"""The family of every MODEL that none of our own families matches: it trains on ComfyUI's own forward."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...common.core import version
from ...common.text import joined
from ...memory.low_bit.quantize import AS_STORED
from ...memory.weights.frozen import FrozenWeights
from ..blocks import find_blocks, lists_of, numbered
from ..family import Family, ModelInputs, NoisySample, Origin, Patches, SampleFacts, Transformer
from ..latents import LatentPolicy, policy_of_format
from ..layers.attention import attention_function
from .comfyui.leftovers import as_loaded
from .facts.lookup import facts_of, is_tested, named_facts
from .facts.untrained import why_untrained
from .inputs import native_inputs, patchify
from .kernels import AttentionCalls, watched_calls
from .names import native_names, origin_of
from .objective import SamplingObjective, default_shift, objective_of
from .shadow import Shadow
from .transformer import INFLUENCE, Batching, NativeTransformer, OnDevice
from .writes.out_of_place import blocks_to_leave_eager

log = logging.getLogger(__name__)

# The largest relative difference between our run of a forward and ComfyUI's own, due to rounding in other kernels. If
# this model's rounding error in the run's dtype can be measured, ROUNDINGS times that is the bound.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
ROUNDINGS, LEAST_NOISE = 3.0, 5e-3
EXACT = 2e-3  # in fp32, in which correct forwards differ by 1e-5

HIDDEN = "Its code assigns to parts of tensors that it writes in place, which the compiler does not follow."


class NativeFamily(Family):
    """The family of one MODEL, to which it keeps no reference."""

    own_forward = False
    whole_grids = True

    def __init__(self, model: Any):
        """Read the model's facts. Raises ValueError, with the reason, for a model that can't be trained."""
        self.title = type(model).__name__
        if (untrained := why_untrained(model)) is not None:
            name, cause = untrained
            raise ValueError(f"model is {name}, which Train LoRA can't train ({cause}); connect another MODEL.")
        if (reason := _cannot_train(model)) is not None:
            raise ValueError(f"model is a {self.title}, which Train LoRA cannot train: {reason}.")
        blocks = find_blocks(model.diffusion_model)
        self.facts = facts_of(model)
        self._results: dict[tuple[str, str], Any] = {}
        self._streams: dict[str, set[int]] = {}
        self._batching = Batching()
        self._calls = AttentionCalls()
        self.title = self.facts.title
        self.tested_by_name = is_tested(model)
        # One without a row may have a class of our families, with another forward.
        self.name = f"native-{self.facts.name}" if named_facts(model) is None else self.facts.name
        self.model_class = type(model)
        self.transformer_class = type(model.diffusion_model)
        self.names = native_names(model)
        self.default_targets = self.facts.default_targets
        self.usual = self.facts.usual
        self.swap_order = tuple(lists_of(blocks))

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

    def latents(self, model: Any) -> LatentPolicy:
        return self.facts.latents or policy_of_format(self.title, model.latent_format)

    def check(self, model: Any, sample: SampleFacts) -> None:
        if sample.frames > 1 and model.latent_format.latent_dimensions == 2:
            raise ValueError(f"{sample.name} is a clip of {sample.frames} frames; {self.title} trains on pictures.")
        if sample.clean_frames:
            raise ValueError(
                f"{sample.name} gives its first frame without noise, which {self.title} is not trained with; switch "
                "image_to_video off in Prepare Dataset."
            )

    def objective(self, patcher: ModelPatcher) -> SamplingObjective:
        return objective_of(patcher)

    def shift(self, model: Any, tokens: int) -> float:
        return default_shift(model) if self.facts.shift is None else self.facts.shift

    def notes(self, model: Any, samples: Sequence[SampleFacts]) -> list[str]:
        return self.facts.remarks()

    def distillation_notes(self, model: Any) -> list[str]:
        return self.facts.distillation_notes()

    def takes_guidance(self, model: Any) -> bool:
        return bool(model.model_config.unet_config.get("guidance_embed"))

    def text_length(self, model: Any, length: int) -> int:
        return length

    def text_width(self, model: Any) -> int:
        return 0

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
        return NativeTransformer(
            self.title,
            Shadow(patcher, weights),
            blocks,
            attend,
            compute_dtype,
            self._results,
            self._streams,
            self._batching,
        )

    def training(self, transformer: Transformer) -> AbstractContextManager[None]:
        assert isinstance(transformer, NativeTransformer)
        return transformer.training()

    def check_forward(
        self, transformer: Transformer, on_device: OnDevice, inputs: ModelInputs, small: ModelInputs | None
    ) -> dict[str, str]:
        assert isinstance(transformer, NativeTransformer)
        if (mismatch := transformer.shadow.mismatch()) is not None:
            raise ValueError(
                f"model is a {self.title} whose {mismatch.name} is read {mismatch.difference:.1%} differently than "
                "ComfyUI reads it, so its LoRA would be wrong; nothing was trained. Please report this model."
            )
        bound = TOLERANCE[transformer.dtype]
        with blocks_to_leave_eager() as eager_blocks, watched_calls() as calls:
            difference = transformer.difference(on_device, inputs)
            if small is not None and difference <= bound:
                bound = self._check_precisely(transformer, on_device, small)
        if not difference <= bound:
            raise ValueError(self._differs(difference, calls.unread))
        self._calls = calls
        return {name: HIDDEN for name, block in transformer.blocks() if block.name in eager_blocks}

    def _check_precisely(self, transformer: NativeTransformer, on_device: OnDevice, small: ModelInputs) -> float:
        """Compare in fp32. Returns the bound for the run's dtype from its measured rounding error."""
        largest = TOLERANCE[transformer.dtype]
        try:
            difference, noise = transformer.precise_difference(on_device, small)
        except Exception as error:  # from core, which may cast to a dtype of its own or need a larger grid
            if comfy.model_management.is_oom(error):
                raise
            log.debug("%s does not run in fp32: %s", self.title, error)
            return largest
        if not difference <= EXACT:
            raise ValueError(self._differs(difference))
        return min(largest, max(ROUNDINGS * noise, LEAST_NOISE))

    def _differs(self, difference: float, unread: Iterable[str] = ()) -> str:
        names = ", ".join(sorted(unread))
        unread_note = f" It hands {names} to its attention, which training doesn't know." if names else ""
        return (
            f"model is a {self.title} whose output is {difference:.1%} different when it runs for training in ComfyUI "
            f"{version()}, so its LoRA would be wrong; nothing was trained.{unread_note} Please report this model."
        )

    def kernel_notes(self) -> Iterator[str]:
        if self._calls.preferred:
            names = joined(sorted(self._calls.preferred))
            yield (
                f"{self.title} asks for {names} in ComfyUI, which can't be used for training: torch's attention runs "
                "in its place."
            )
        if self._calls.torch_only:
            yield (
                f"{self.title} masks or scales some of its attention, which the attention chosen on Training Memory "
                "can't do: torch's runs in its place."
            )

    def check_batch(self, transformer: Transformer, on_device: OnDevice, inputs: ModelInputs) -> str | None:
        assert isinstance(transformer, NativeTransformer)
        if self._batching.apart or not self.facts.batches:
            return None
        influence = transformer.influence(on_device, inputs)
        log.debug("One sample of a batch changes another by %.2g in %s.", influence, self.title)
        if influence <= INFLUENCE:
            return None
        self._batching.apart = True
        return f"Samples of one batch change each other in {self.title}, so each runs by itself."

    def check_outside(self, transformer: Transformer, on_device: OnDevice, inputs: ModelInputs) -> None:
        assert isinstance(transformer, NativeTransformer)
        transformer.check_outside(on_device, inputs)

    def transformer(self, model: Any, weights: FrozenWeights, attention: Any) -> Transformer:
        raise AssertionError("a native family builds its transformer from a patcher")

    def patchify(self, latent: Tensor, keep: int) -> Patches:
        return patchify(latent, keep)

    def inputs(
        self, patcher: ModelPatcher, samples: Sequence[NoisySample], sigma: Tensor, guidance: float
    ) -> ModelInputs:
        # A model that was not distilled interprets it differently, like Chroma, or ignores it.
        distilled = self.takes_guidance(patcher.model)
        facts = self.facts
        return native_inputs(
            patcher, samples, sigma, guidance if distilled else None, sound=facts.sound, batches=facts.batches
        )


def _cannot_train(model: Any) -> str | None:
    if not isinstance(getattr(model, "diffusion_model", None), torch.nn.Module):
        return "it isn't a diffusion model"
    if model.latent_format.latent_dimensions == 1:
        return "it doesn't make pictures or video"
    if not find_blocks(model.diffusion_model):
        return "it has no blocks of one structure"
    return None

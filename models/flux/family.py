"""The families of FLUX: FLUX.1 (dev, schnell, Kontext) and FLUX.2 (dev, klein)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import comfy.ldm.flux.model
import comfy.model_base
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...common.text import quantity
from ...memory.weights.frozen import FrozenWeights
from ..conditioning import model_conditioning, padded_texts
from ..family import (
    ConditioningFacts,
    Family,
    ModelInputs,
    NoisySample,
    Origin,
    OwnForward,
    Patches,
    SampleFacts,
    SamplingFacts,
    UsualSettings,
)
from ..text import uncut_note
from .names import FLUX1_NAMES, FLUX2_NAMES
from .patchify import TIMESTEP_ZERO, patchify_image, patchify_references
from .text import FLUX2_TEXT_LENGTH, Flux1Text, Flux2Text
from .transformer import Flux2Transformer, FluxInputs, FluxTransformer

# FLUX's sampler shifts its sigmas by exp(mu), with mu linear in the picture's token count through these two points
# (black-forest-labs/flux, src/flux/sampling.py, get_lin_function and get_schedule).
MU_AT_256_TOKENS = 0.5
MU_AT_4096_TOKENS = 1.15
SCHNELL_TEXT_LENGTH, DEV_TEXT_LENGTH = 256, 512
# Hidden sizes of the models without guidance (musubi-tuner, flux_2/flux2_models.py: Klein4BParams, Klein9BParams). The
# distilled models have the same weight shapes as the base ones.
KLEIN = {3072: "klein-4b", 4096: "klein-9b"}


def resolution_shift(tokens: int) -> float:
    """Compute exp(mu) of FLUX's sampler for a picture of that many tokens; mu is extrapolated past both ends, as in
    FLUX."""
    mu = MU_AT_256_TOKENS + (MU_AT_4096_TOKENS - MU_AT_256_TOKENS) * (tokens - 256) / (4096 - 256)
    return math.exp(mu)


def flux2_resolution_shift(tokens: int) -> float:
    """Compute exp(mu) of FLUX.2's sampler for a picture of that many tokens, at its default of 50 steps
    (black-forest-labs/flux2, src/flux2/sampling.py, compute_empirical_mu): between two lines, one fitted to 10 steps
    and one to 200, and above 4300 tokens the latter."""
    at_10, at_200 = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
    return math.exp(at_200 if tokens > 4300 else at_200 + (at_10 - at_200) * (200 - 50) / (200 - 10))


# A single block runs all tokens through all of its weights, a double block the few text tokens through half of them: a
# single block computes longer per byte to copy in the meantime.
SWAP_ORDER = ("single_blocks", "double_blocks")


class FluxConditioning(ConditioningFacts):
    """Widths are those of the model's own layers."""

    def takes_guidance(self, model: Any) -> bool:
        return bool(model.diffusion_model.params.guidance_embed)

    def text_width(self, model: Any) -> int:
        """Return the width of the model's text input."""
        return model.diffusion_model.txt_in.in_features

    def pooled_width(self, model: Any) -> int:
        """Return the width of the model's pooled text input; 0 if it takes none."""
        vector_in = model.diffusion_model.vector_in
        return 0 if vector_in is None else vector_in.in_layer.in_features


@dataclass(frozen=True, kw_only=True)
class FluxForward(OwnForward):
    """Forward of FLUX.1 and FLUX.2. An image's tokens are followed by those of its reference images.

    axes: of the positions.
    """

    axes: int

    def block_lists(self, model: Any) -> dict[str, int]:
        flux = model.diffusion_model
        return {"double_blocks": len(flux.double_blocks), "single_blocks": len(flux.single_blocks)}

    def patchify(self, latent: Tensor, keep: int) -> Patches:
        """Cut a latent (C, H, W) into tokens: the first `keep` in row order, and their positions."""
        patches = patchify_image(latent, self.text.latents[0].patch, self.axes)
        return Patches(patches.tokens[:keep], patches.positions[:keep])

    def inputs(
        self, patcher: ModelPatcher, samples: Sequence[NoisySample], sigma: Tensor, guidance: float
    ) -> ModelInputs:
        device, dtype = sigma.device, patcher.model.get_dtype_inference()
        params = patcher.model.diffusion_model.params
        patches = []
        references = []
        methods = []
        conds = []
        for sample in samples:
            cond = model_conditioning(
                patcher.model, sample.latent, sample.text, sample.conditioning, guidance, device, {"ref_latents"}
            )
            if "attention_mask" in cond:
                raise ValueError(
                    f"positive carries an attention mask, which {self.title} training does not take; remove it."
                )
            concat = cond.get("c_concat")
            latent = sample.latent if concat is None else torch.cat((sample.latent, concat[0].to(sample.latent.dtype)))
            patches.append(self.patchify(latent.to(dtype), sample.tokens))
            methods.append(self.reference_method(cond.get("ref_latents_method", params.default_ref_method)))
            if latents := cond.get("ref_latents"):
                references.append(patchify_references(latents, methods[-1], sample.latent.shape[-2:], params))
            conds.append(cond)
        assert len(references) in (0, len(samples)), "a batch is of one graph key"
        # Core casts the latent, then the text and the float extras, guidance too; sigma stays fp32 up to the embedding.
        timestep = patcher.get_model_object("model_sampling").timestep(sigma).float()
        timestep = patcher.model.process_timestep(timestep)
        positions = torch.stack([p.positions for p in patches])
        if references:
            positions = torch.cat((positions, torch.stack([p.positions for p in references])), dim=1)
        length = samples[0].text_length
        text, text_mask = padded_texts([c["c_crossattn"] for c in conds], length, self.text.masks(length))
        return FluxInputs(
            tokens=torch.stack([p.tokens for p in patches]),
            references=torch.stack([p.tokens for p in references]) if references else None,
            positions=positions,
            text=text,
            text_mask=text_mask,
            pooled=_pooled(conds),
            timestep=timestep,
            reference_timestep=self.reference_timestep(timestep, methods) if references else None,
            guidance=torch.cat([c["guidance"] for c in conds]) if all("guidance" in c for c in conds) else None,
        )

    def reference_method(self, method: str) -> str:
        """Check ComfyUI's name of the method that positions references. Raises ValueError for one that the model does
        not run."""
        return method

    def reference_timestep(self, timestep: Tensor, methods: Sequence[str]) -> Tensor | None:
        """Return the timestep of each sample's references, (B,), or None if it is always that of the sample.

        If a model supports both, there is always a second modulation, so that a graph does not depend on a batch's
        methods.
        """
        zero = torch.tensor([method == TIMESTEP_ZERO for method in methods], device=timestep.device)
        return torch.where(zero, 0 * timestep, timestep)


class Flux1Forward(FluxForward):
    """Forward of FLUX.1, whose references have the timestep of their sample."""

    def reference_method(self, method: str) -> str:
        if method == TIMESTEP_ZERO:
            raise ValueError(
                f"reference_latents_method is {TIMESTEP_ZERO}, which ComfyUI cannot run on FLUX.1; set it to offset, "
                "Kontext's own, on Edit Model Reference Method."
            )
        return method

    def reference_timestep(self, timestep: Tensor, methods: Sequence[str]) -> Tensor | None:
        return None

    def transformer(self, model: Any, weights: FrozenWeights, attention: Any) -> FluxTransformer:
        return FluxTransformer(weights, model.diffusion_model, attention)


class Flux2Forward(FluxForward):
    """Forward of FLUX.2."""

    def transformer(self, model: Any, weights: FrozenWeights, attention: Any) -> Flux2Transformer:
        return Flux2Transformer(weights, model.diffusion_model, attention)


class Flux2Sampling(SamplingFacts):
    def shift(self, model: Any, tokens: int) -> float:
        """Return musubi-tuner's shift: docs/flux_2.md trains with `--timestep_sampling flux2_shift`, which is exp(mu)
        of FLUX.1's sampler at FLUX.2's token count; FLUX.2's own sampler matches that line at 200 steps
        (black-forest-labs/flux2, src/flux2/sampling.py, compute_empirical_mu)."""
        return resolution_shift(tokens)


class FluxFamily(Family):
    """Base of FLUX.1 and FLUX.2, and of Chroma, whose blocks are theirs."""

    # Attention and MLP of every block, without modulation, like musubi-tuner (networks/lora_flux.py and lora_flux_2.py:
    # exclude_patterns).
    default_targets = (
        "double_blocks.*.img_attn.*",
        "double_blocks.*.txt_attn.*",
        "double_blocks.*.img_mlp.*",
        "double_blocks.*.txt_mlp.*",
        "single_blocks.*.linear1",
        "single_blocks.*.linear2",
    )

    def check(self, model: Any, sample: SampleFacts) -> None:
        super().check(model, sample)
        params = model.diffusion_model.params
        if sample.references and params.in_channels != params.out_channels:
            raise ValueError(
                f"{sample.name} has reference pictures, which this model (Fill, Canny or Depth) has no place for; "
                "connect FLUX.1 Kontext, or prepare the data without control_folder."
            )
        if params.in_channels != params.out_channels and "concat_latent_image" not in sample.conditioning:
            raise ValueError(
                f"{sample.name} has no control picture, without which this model (Fill, Canny or Depth) would be "
                "trained blind; put it on the conditioning with core's InpaintModelConditioning or "
                "InstructPixToPixConditioning and take Latents to Training Data, or connect FLUX.1 dev."
            )


class Flux(FluxFamily):
    """FLUX.1: dev, schnell, and every checkpoint of that shape. Kontext is one of them, trained to see reference
    pictures; its weights don't distinguish it from dev."""

    name = "flux"
    title = "FLUX.1"
    releases = "dev, schnell, Kontext"
    model_class = comfy.model_base.Flux
    transformer_class = comfy.ldm.flux.model.Flux
    text = Flux1Text()
    names = FLUX1_NAMES
    # Learning rate: ai-toolkit's examples.
    usual = UsualSettings(file_names=r"flux(?![ ._-]?[23]([^0-9]|$))", pictures_only=True, cfg=1.0)
    sampling = SamplingFacts(text.latents[0], resolution_shifts={"resolution_shifted": resolution_shift})
    conditioning = FluxConditioning(text)
    forward = Flux1Forward(title, SWAP_ORDER, text, axes=3)

    def matches(self, model: Any) -> bool:
        """Return whether this is ComfyUI's FLUX.1; FLUX.2 and other models that subclass it run another forward."""
        if not super().matches(model):
            return False
        params = model.diffusion_model.params
        other = ("global_modulation", "mlp_silu_act", "yak_mlp", "txt_norm")
        return not any(getattr(params, name, False) for name in other) and not getattr(params, "txt_ids_dims", [])

    def variant(self, model: Any) -> str:
        """Return `dev` if the model takes guidance, else `schnell`."""
        return "dev" if model.diffusion_model.params.guidance_embed else "schnell"

    def origin(self, model: Any) -> Origin:
        url = "https://github.com/black-forest-labs/flux"
        return Origin(f"flux-1-{self.variant(model)}", url, "flux1", "networks.lora_flux")

    def notes(self, model: Any, samples: Sequence[SampleFacts]) -> list[str]:
        is_dev = self.variant(model) == "dev"
        limit = DEV_TEXT_LENGTH if is_dev else SCHNELL_TEXT_LENGTH
        long = sum(sample.text_length > limit for sample in samples)
        if not long:
            return []
        if is_dev:
            return [uncut_note(long, DEV_TEXT_LENGTH, "FLUX.1 dev")]
        return [
            f"{quantity(long, 'caption has', 'captions have')} more than {SCHNELL_TEXT_LENGTH} tokens, the length that "
            f"FLUX.1 schnell was trained with; set max_text_length to {SCHNELL_TEXT_LENGTH} on Prepare Dataset if this "
            "is schnell."
        ]

    def distillation_notes(self, model: Any) -> list[str]:
        if self.variant(model) == "dev":
            return []
        # ostris/ai-toolkit, config/examples/train_lora_flux_schnell_24gb.yaml; toolkit/stable_diffusion_model.py
        return [
            "If this is FLUX.1 schnell: it's distilled, and plain training undoes that; choose "
            "ostris/FLUX.1-schnell-training-adapter (pytorch_lora_weights.safetensors) at training_adapter of LoRA "
            "Network."
        ]


class Flux2(FluxFamily):
    """FLUX.2: dev, klein and klein base. All of them see reference pictures."""

    name = "flux2"
    title = "FLUX.2"
    releases = "dev, klein"
    model_class = comfy.model_base.Flux2
    transformer_class = comfy.ldm.flux.model.Flux
    text = Flux2Text()
    names = FLUX2_NAMES
    # Learning rate: musubi-tuner, docs/flux_2.md.
    usual = UsualSettings(
        file_names=r"flux[ ._-]?2([^0-9]|$)", pictures_only=True, prompt_tokens=FLUX2_TEXT_LENGTH, cfg=1.0
    )
    sampling = Flux2Sampling(text.latents[0], resolution_shifts={"resolution_flux2": flux2_resolution_shift})
    conditioning = FluxConditioning(text)
    forward = Flux2Forward(title, SWAP_ORDER, text, axes=4)

    def matches(self, model: Any) -> bool:
        if not super().matches(model):
            return False
        params = model.diffusion_model.params
        other = any(getattr(params, name, False) for name in ("yak_mlp", "txt_norm"))
        return params.global_modulation and params.mlp_silu_act and not other

    def variant(self, model: Any) -> str:
        """Return `dev` if the model takes guidance, else `klein-4b` or `klein-9b`, or `klein` for another size."""
        params = model.diffusion_model.params
        return "dev" if params.guidance_embed else KLEIN.get(params.hidden_size, "klein")

    def origin(self, model: Any) -> Origin:
        """Return the origin as musubi-tuner writes it (utils/sai_model_spec.py, dataset/architectures.py)."""
        variant, url = self.variant(model), "https://github.com/black-forest-labs/flux2"
        return Origin(f"Flux.2-{variant}", url, f"flux_2_{variant.replace('-', '_')}", "networks.lora_flux_2")

    def notes(self, model: Any, samples: Sequence[SampleFacts]) -> list[str]:
        long = sum(sample.text_length > FLUX2_TEXT_LENGTH for sample in samples)
        return [uncut_note(long, FLUX2_TEXT_LENGTH, self.title)] if long else []

    def distillation_notes(self, model: Any) -> list[str]:
        if self.variant(model) == "dev":
            return []
        return [
            "If this is FLUX.2 klein and not klein base: it's distilled, and plain training undoes that; train on "
            "klein base and look at the LoRA on klein (model of Training Preview)."
        ]


def _pooled(conds: Sequence[dict[str, Tensor]]) -> Tensor | None:
    """Stack the pooled texts, (B, P); a sample without one gets zeros, as in core."""
    pooled = [c["y"] for c in conds if "y" in c]
    return torch.cat([c.get("y", torch.zeros_like(pooled[0])) for c in conds]) if pooled else None


FAMILIES = (Flux(), Flux2())

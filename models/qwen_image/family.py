"""Qwen-Image: the transformer of QwenLM/Qwen-Image over the weights of ComfyUI's `comfy.ldm.qwen_image.model`.

Edit models see their reference pictures as tokens after the picture's own. Text follows both, so that a caption's pads
are a sample's last tokens, which no other token attends to: padding does not change the output.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import comfy.ldm.qwen_image.model
import comfy.model_base
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...common.text import quantity
from ...memory.weights.frozen import FrozenWeights
from ..family import (
    ConditioningFacts,
    Family,
    NoisySample,
    Origin,
    OwnForward,
    Patches,
    SampleFacts,
    SamplingFacts,
    UsualSettings,
)
from .names import QWEN_IMAGE_NAMES
from .patchify import first, own_conditioning, own_text, patchify_image, sample_parts
from .text import QwenImageText
from .transformer import QwenInputs, QwenTransformer


def qwen_resolution_shift(tokens: int) -> float:
    """Compute exp(mu) of Qwen-Image's sampler for a picture of that many tokens: mu from 0.5 at 256 tokens to 0.9 at
    8192 (Qwen/Qwen-Image, scheduler/scheduler_config.json, in diffusers' calculate_shift)."""
    return math.exp(0.5 + (0.9 - 0.5) * (tokens - 256) / (8192 - 256))


class QwenConditioning(ConditioningFacts):
    def text_width(self, model: Any) -> int:
        return model.diffusion_model.txt_in.in_features


class QwenForward(OwnForward):
    """Forward of Qwen-Image, which masks the pads of captions."""

    def transformer(self, model: Any, weights: FrozenWeights, attention: Any) -> QwenTransformer:
        return QwenTransformer(weights, model.diffusion_model, attention)

    def patchify(self, latent: Tensor, keep: int) -> Patches:
        """Cut a latent (C, 1, H, W) into tokens: the first `keep` in row order, and their positions."""
        return first(patchify_image(latent), keep)

    def as_core_takes(self, sample: NoisySample) -> NoisySample:
        return replace(sample, text=own_text(sample), conditioning=own_conditioning(sample))

    def inputs(
        self, patcher: ModelPatcher, samples: Sequence[NoisySample], sigma: Tensor, guidance: float
    ) -> QwenInputs:
        timestep = patcher.model.process_timestep(patcher.get_model_object("model_sampling").timestep(sigma).float())
        parts = [sample_parts(patcher.model, sample, guidance, sigma.device) for sample in samples]
        references = [part.references for part in parts if part.references is not None]
        zero = torch.tensor([part.clean_at_zero for part in parts], device=sigma.device)
        return QwenInputs(
            tokens=torch.stack([part.tokens for part in parts]),
            references=torch.stack(references) if references else None,
            text=torch.stack([part.text for part in parts]),
            positions=torch.stack([part.positions for part in parts]),
            lengths=torch.tensor([part.length for part in parts], dtype=torch.int64, device="cpu"),
            timestep=timestep,
            # With references there are always two rows of modulation, so that a step's graph does not depend on its
            # samples' method.
            reference_timestep=torch.where(zero, 0 * timestep, timestep) if references else None,
        )


class QwenImage(Family):
    """The Qwen-Image family: Qwen-Image, Edit, Edit-2509, Edit-2511 and their fine-tunes."""

    name = "qwen-image"
    title = "Qwen-Image"
    releases = "with Edit"
    model_class = comfy.model_base.QwenImage
    transformer_class = comfy.ldm.qwen_image.model.QwenImageTransformer2DModel
    text = QwenImageText()
    names = QWEN_IMAGE_NAMES
    # Learning rate: musubi-tuner, docs/qwen_image.md.
    usual = UsualSettings(
        learning_rate=5e-5,
        file_names="qwen[ _-]?image",
        pictures_only=True,
        prompt_tokens=128,
        negative_tokens=8,
    )
    # Shift: musubi-tuner's docs/qwen_image.md trains with `--timestep_sampling shift --discrete_flow_shift 2.2`.
    sampling = SamplingFacts(text.latents[0], 2.2, {"resolution_qwen": qwen_resolution_shift})
    conditioning = QwenConditioning(text)
    forward = QwenForward(title, ("transformer_blocks",), text, ragged=True)
    # Every Linear of a block except the modulation, which musubi-tuner excludes too (networks/lora_qwen_image.py:
    # exclude_patterns `.*(_mod_).*`).
    default_targets = (
        "transformer_blocks.*.attn.*",
        "transformer_blocks.*.img_mlp.*",
        "transformer_blocks.*.txt_mlp.*",
    )

    def variant(self, model: Any) -> str:
        """Return the release. Edit and Edit-2509 can't be distinguished from Qwen-Image by their weights."""
        timestep_zero = model.diffusion_model.default_ref_method == "index_timestep_zero"
        return "qwen-image-edit-2511" if timestep_zero else "qwen-image"

    def origin(self, model: Any) -> Origin:
        """Return the origin as musubi-tuner writes it (utils/sai_model_spec.py, dataset/architectures.py)."""
        url, module = "https://github.com/QwenLM/Qwen-Image", "networks.lora_qwen_image"
        if self.variant(model) == "qwen-image":
            return Origin("Qwen-Image", url, "qwen_image", module)
        return Origin("Qwen-Image-Edit-2511", url, "qwen_image_edit", module)

    def check(self, model: Any, sample: SampleFacts) -> None:
        if model.diffusion_model.time_text_embed.use_additional_t_cond:
            raise ValueError(
                "model is Qwen-Image-Layered, which Train LoRA cannot train; connect Qwen-Image or one of its Edit "
                "models."
            )
        super().check(model, sample)

    def notes(self, model: Any, samples: Sequence[SampleFacts]) -> list[str]:
        alone = sum(not sample.references for sample in samples)
        if self.variant(model) == "qwen-image" or not alone:
            return []
        total = quantity(len(samples), "sample")
        return [
            f"{quantity(alone, f'of {total} has', f'of {total} have')} no reference picture, and the model is "
            "Qwen-Image-Edit-2511, which was trained to edit; give control pictures, or connect Qwen-Image to train on "
            "pictures alone."
        ]


FAMILIES = (QwenImage(),)

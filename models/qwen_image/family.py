"""Qwen-Image: the transformer of QwenLM/Qwen-Image over the weights of ComfyUI's `comfy.ldm.qwen_image.model`.

Edit models see their reference pictures as tokens behind the picture's own. Text stands behind both, so that a
caption's pads are a sample's last tokens, which no other token attends to: a padded caption gives what it gives alone.
"""

from collections.abc import Sequence
from typing import Any

import comfy.model_base
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...memory.weights.frozen import FrozenWeights
from ..family import NoisySample, Origin, Patches, SampleFacts
from ..latents import WAN21, LatentPolicy
from ..layers.attention import ragged_attention_function
from ..text_lengths import padded_length
from .tokens import cut_picture, first, sample_parts
from .transformer import QwenInputs, QwenTransformer


class QwenImage:
    """The Qwen-Image family: Qwen-Image, Edit, Edit-2509, Edit-2511 and their fine-tunes."""

    name = "qwen-image"
    title = "Qwen-Image"
    # Every Linear of a block but the modulation, which musubi-tuner leaves out too (networks/lora_qwen_image.py:
    # exclude_patterns `.*(_mod_).*`).
    default_targets: tuple[str, ...] = (
        "transformer_blocks.*.attn.*",
        "transformer_blocks.*.img_mlp.*",
        "transformer_blocks.*.txt_mlp.*",
    )
    swap_order: tuple[str, ...] = ("transformer_blocks",)

    def matches(self, model: Any) -> bool:
        return type(model) is comfy.model_base.QwenImage

    def variant(self, model: Any) -> str:
        """Edit and Edit-2509 can't be told from Qwen-Image by their weights."""
        timestep_zero = model.diffusion_model.default_ref_method == "index_timestep_zero"
        return "qwen-image-edit-2511" if timestep_zero else "qwen-image"

    def origin(self, model: Any) -> Origin:
        """As musubi-tuner writes them (utils/sai_model_spec.py, dataset/architectures.py)."""
        url, module = "https://github.com/QwenLM/Qwen-Image", "networks.lora_qwen_image"
        if self.variant(model) == "qwen-image":
            return Origin("Qwen-Image", url, "qwen_image", module)
        return Origin("Qwen-Image-Edit-2511", url, "qwen_image_edit", module)

    def latents(self, model: Any) -> LatentPolicy:
        return WAN21

    def shift(self, model: Any, tokens: int) -> float:
        """musubi-tuner's docs/qwen_image.md trains with `--timestep_sampling shift --discrete_flow_shift 2.2`."""
        return 2.2

    def expert_boundary(self, model: Any) -> float | None:
        return None

    def takes_guidance(self, model: Any) -> bool:
        return False

    def text_width(self, model: Any) -> int:
        return model.diffusion_model.txt_in.in_features

    def pooled_width(self, model: Any) -> int:
        return 0

    def vision_width(self, model: Any) -> int:
        return 0

    def text_length(self, model: Any, length: int) -> int:
        return padded_length(length)

    def check(self, model: Any, sample: SampleFacts) -> None:
        if model.diffusion_model.time_text_embed.use_additional_t_cond:
            raise ValueError(
                "model is Qwen-Image-Layered, which Train LoRA cannot train; connect Qwen-Image or one of its Edit "
                "models."
            )
        if sample.frames > 1:
            raise ValueError(f"{sample.name} is a clip of {sample.frames} frames; Qwen-Image trains on pictures.")

    def notes(self, model: Any, samples: Sequence[SampleFacts]) -> list[str]:
        alone = sum(not sample.references for sample in samples)
        if self.variant(model) == "qwen-image" or not alone:
            return []
        return [
            f"{alone} of {len(samples)} samples have no reference picture, and the model is Qwen-Image-Edit-2511, "
            "which was trained to edit; give control pictures, or connect Qwen-Image to train on pictures alone."
        ]

    def build(
        self,
        patcher: ModelPatcher,
        device: torch.device,
        compute_dtype: torch.dtype,
        attention: str,
        on_host: frozenset[str] = frozenset(),
    ) -> QwenTransformer:
        weights = FrozenWeights(patcher, device, compute_dtype, on_host)
        attend = ragged_attention_function(attention, device, compute_dtype)
        return QwenTransformer(weights, patcher.model.diffusion_model, attend)

    def block_lists(self, model: Any) -> dict[str, int]:
        return {"transformer_blocks": len(model.diffusion_model.transformer_blocks)}

    def cut(self, latent: Tensor, keep: int) -> Patches:
        """latent: (C, 1, H, W) → the first `keep` of its tokens in row order, and their positions."""
        return first(cut_picture(latent), keep)

    def inputs(
        self, patcher: ModelPatcher, samples: Sequence[NoisySample], sigma: Tensor, guidance: float
    ) -> QwenInputs:
        """The batch as the transformer takes it. sigma: (B,) fp32. Raises ValueError for a conditioning
        that this forward does not run."""
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
            # With references there are always two rows of modulation, so that a step's graph does not depend on the
            # method that its samples name.
            reference_timestep=torch.where(zero, 0 * timestep, timestep) if references else None,
        )

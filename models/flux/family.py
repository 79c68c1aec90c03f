"""What the families of FLUX have in common."""

from collections.abc import Sequence
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...memory.weights.frozen import FrozenWeights
from ..conditioning import model_conditioning
from ..family import NoisySample, Patches, SampleFacts
from ..latents import LatentPolicy
from ..layers.attention import attention_function
from .tokens import TIMESTEP_ZERO, cut_picture, cut_references
from .transformer import FluxInputs, FluxTransformer


class FluxFamily:
    """What FLUX.1 and FLUX.2 share. A picture's tokens are followed by those of its reference pictures."""

    title: str
    policy: LatentPolicy
    transformer: type[FluxTransformer]
    axes: int
    # Attention and MLP of every block; the modulation is left out, as musubi-tuner does (networks/lora_flux.py and
    # lora_flux_2.py: exclude_patterns).
    default_targets: tuple[str, ...] = (
        "double_blocks.*.img_attn.*",
        "double_blocks.*.txt_attn.*",
        "double_blocks.*.img_mlp.*",
        "double_blocks.*.txt_mlp.*",
        "single_blocks.*.linear1",
        "single_blocks.*.linear2",
    )
    # A single block runs all tokens through all of its weights, a double block the few of the text through half of
    # them: a single block computes longer for each byte that has to be copied meanwhile.
    swap_order: tuple[str, ...] = ("single_blocks", "double_blocks")

    def latents(self, model: Any) -> LatentPolicy:
        return self.policy

    def expert_boundary(self, model: Any) -> float | None:
        return None

    def takes_guidance(self, model: Any) -> bool:
        return bool(model.diffusion_model.params.guidance_embed)

    def text_width(self, model: Any) -> int:
        """The width of the text encoder's output that the model takes."""
        return model.diffusion_model.txt_in.in_features

    def pooled_width(self, model: Any) -> int:
        """The width of the pooled text that the model takes; 0 where it takes none."""
        vector_in = model.diffusion_model.vector_in
        return 0 if vector_in is None else vector_in.in_layer.in_features

    def vision_width(self, model: Any) -> int:
        return 0

    def check(self, model: Any, sample: SampleFacts) -> None:
        if sample.frames > 1:
            raise ValueError(f"{sample.name} is a clip of {sample.frames} frames; {self.title} trains on pictures.")
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

    def build(
        self,
        patcher: ModelPatcher,
        device: torch.device,
        compute_dtype: torch.dtype,
        attention: str,
        on_host: frozenset[str] = frozenset(),
    ) -> FluxTransformer:
        weights = FrozenWeights(patcher, device, compute_dtype, on_host)
        attend = attention_function(attention, device, compute_dtype)
        return self.transformer(weights, patcher.model.diffusion_model, attend)

    def block_lists(self, model: Any) -> dict[str, int]:
        """The lists of blocks in the order of the forward, with their lengths."""
        flux = model.diffusion_model
        return {"double_blocks": len(flux.double_blocks), "single_blocks": len(flux.single_blocks)}

    def cut(self, latent: Tensor, keep: int) -> Patches:
        """latent: (C, H, W) → the first `keep` of its tokens in row order, and their positions."""
        patches = cut_picture(latent, self.policy.patch, self.axes)
        return Patches(patches.tokens[:keep], patches.positions[:keep])

    def inputs(
        self, patcher: ModelPatcher, samples: Sequence[NoisySample], sigma: Tensor, guidance: float
    ) -> FluxInputs:
        """The batch as the transformer takes it. sigma: (B,) fp32. Raises ValueError for a conditioning
        that this forward does not run."""
        device, dtype = sigma.device, patcher.model.get_dtype_inference()
        params = patcher.model.diffusion_model.params
        patches, references, methods, conds = [], [], [], []
        for sample in samples:
            cond = model_conditioning(
                patcher.model, sample.latent, sample.text, sample.conditioning, guidance, device, {"ref_latents"}
            )
            if "attention_mask" in cond:
                raise ValueError(
                    f"positive carries an attention mask, which {self.title} training does not take; remove it."
                )
            assert cond["c_crossattn"].shape[1] == sample.text_length, (cond["c_crossattn"].shape, sample.text_length)
            concat = cond.get("c_concat")
            latent = sample.latent if concat is None else torch.cat((sample.latent, concat[0].to(sample.latent.dtype)))
            patches.append(self.cut(latent.to(dtype), sample.tokens))
            methods.append(self.reference_method(cond.get("ref_latents_method", params.default_ref_method)))
            if latents := cond.get("ref_latents"):
                references.append(cut_references(latents, methods[-1], sample.latent.shape[-2:], params))
            conds.append(cond)
        assert len(references) in (0, len(samples)), "a batch is of one graph key"
        # Core casts the latent, then the text and the float extras, guidance too; sigma stays fp32 up to the embedding.
        timestep = patcher.get_model_object("model_sampling").timestep(sigma).float()
        timestep = patcher.model.process_timestep(timestep)
        positions = torch.stack([p.positions for p in patches])
        if references:
            positions = torch.cat((positions, torch.stack([p.positions for p in references])), dim=1)
        return FluxInputs(
            tokens=torch.stack([p.tokens for p in patches]),
            references=torch.stack([p.tokens for p in references]) if references else None,
            positions=positions,
            text=torch.cat([c["c_crossattn"] for c in conds]),
            pooled=_pooled(conds),
            timestep=timestep,
            reference_timestep=self.reference_timestep(timestep, methods) if references else None,
            guidance=torch.cat([c["guidance"] for c in conds]) if all("guidance" in c for c in conds) else None,
        )

    def reference_method(self, method: str) -> str:
        """ComfyUI's name for where references stand. Raises ValueError for one that the model does not run."""
        return method

    def reference_timestep(self, timestep: Tensor, methods: Sequence[str]) -> Tensor | None:
        """What the references of each sample see, (B,), or None where that is always the timestep of the sample.

        Where a model knows both, there is a second modulation whatever a batch's methods are, so that a graph does not
        depend on them.
        """
        zero = torch.tensor([method == TIMESTEP_ZERO for method in methods], device=timestep.device)
        return torch.where(zero, 0 * timestep, timestep)


def _pooled(conds: Sequence[dict[str, Tensor]]) -> Tensor | None:
    """(B, P); a sample without pooled text has zeros, as core gives it."""
    known = [c["y"] for c in conds if "y" in c]
    return torch.cat([c.get("y", torch.zeros_like(known[0])) for c in conds]) if known else None

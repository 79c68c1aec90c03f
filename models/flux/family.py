"""The FLUX.1 family."""

from collections.abc import Sequence
from typing import Any

import comfy.model_base
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...memory.frozen import FrozenWeights
from ..attention import attention_function
from ..conditioning import model_conditioning
from ..family import NoisySample, Origin, Patches, SampleFacts
from ..latents import FLUX, LatentPolicy
from .transformer import FluxInputs, FluxTransformer

SCHNELL_TEXT_LENGTH = 256


class Flux:
    """The FLUX.1 family: dev, schnell, and every checkpoint of that shape."""

    name = "flux"
    title = "FLUX.1"
    # Attention and MLP of every block; the modulation is left out, as the common FLUX trainers do.
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

    def matches(self, model: Any) -> bool:
        """True for ComfyUI's FLUX.1; FLUX.2 and other models that subclass it run another forward."""
        if type(model) is not comfy.model_base.Flux:
            return False
        params = model.diffusion_model.params
        other = ("global_modulation", "mlp_silu_act", "yak_mlp", "txt_norm")
        return not any(getattr(params, name, False) for name in other) and not getattr(params, "txt_ids_dims", [])

    def variant(self, model: Any) -> str:
        """`dev` where the model takes guidance, else `schnell`."""
        return "dev" if model.diffusion_model.params.guidance_embed else "schnell"

    def origin(self, model: Any) -> Origin:
        url = "https://github.com/black-forest-labs/flux"
        return Origin(f"flux-1-{self.variant(model)}", url, "flux1", "networks.lora_flux")

    def latents(self, model: Any) -> LatentPolicy:
        return FLUX

    def shift(self, model: Any, tokens: int) -> float:
        return 1.0

    def expert_boundary(self, model: Any) -> float | None:
        return None

    def text_length(self, model: Any, length: int) -> int:
        return length

    def check(self, model: Any, sample: SampleFacts) -> None:
        if sample.frames > 1:
            raise ValueError(f"{sample.name} is a clip of {sample.frames} frames; FLUX.1 trains on pictures.")

    def text_width(self, model: Any) -> int:
        """The width of the text encoder's output that the model takes."""
        return model.diffusion_model.txt_in.in_features

    def pooled_width(self, model: Any) -> int:
        """The width of the pooled text that the model takes; 0 where it takes none."""
        vector_in = model.diffusion_model.vector_in
        return 0 if vector_in is None else vector_in.in_layer.in_features

    def notes(self, model: Any, text_lengths: Sequence[int]) -> list[str]:
        """What a user should know about these captions' lengths (tokens) on this model."""
        long = sum(length > SCHNELL_TEXT_LENGTH for length in text_lengths)
        if self.variant(model) == "dev" or not long:
            return []
        return [
            f"{long} captions have more than {SCHNELL_TEXT_LENGTH} tokens, the length that FLUX.1 schnell was trained "
            f"with; set max_text_length to {SCHNELL_TEXT_LENGTH} on Prepare Dataset if this is schnell."
        ]

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
        return FluxTransformer(weights, patcher.model.diffusion_model, attend)

    def block_lists(self, model: Any) -> dict[str, int]:
        """The lists of blocks in the order of the forward, with their lengths."""
        flux = model.diffusion_model
        return {"double_blocks": len(flux.double_blocks), "single_blocks": len(flux.single_blocks)}

    def linear_names(self, model: Any) -> list[str]:
        """The module names of every Linear of the model, without reading a weight."""
        return [n for n, m in model.diffusion_model.named_modules() if hasattr(m, "in_features")]

    def inputs(
        self, patcher: ModelPatcher, samples: Sequence[NoisySample], sigma: Tensor, guidance: float
    ) -> FluxInputs:
        """The batch as the transformer takes it. sigma: (B,) fp32 on the device. Raises ValueError for a conditioning
        that this forward does not run."""
        device, dtype = sigma.device, patcher.model.get_dtype_inference()
        patches, conds = [], []
        for sample in samples:
            cond = model_conditioning(patcher.model, sample.latent, sample.text, sample.conditioning, guidance, device)
            if "attention_mask" in cond:
                raise ValueError("positive carries an attention mask, which FLUX.1 training does not take; remove it.")
            concat = cond.get("c_concat")
            latent = sample.latent if concat is None else torch.cat((sample.latent, concat[0].to(sample.latent.dtype)))
            patches.append(self.cut(latent.to(dtype), sample.tokens))
            conds.append(cond)
        # Core casts the latent, then the text and the float extras, guidance too; sigma stays fp32 up to the embedding.
        timestep = patcher.get_model_object("model_sampling").timestep(sigma).float()
        return FluxInputs(
            tokens=torch.stack([p.tokens for p in patches]),
            positions=torch.stack([p.positions for p in patches]),
            text=torch.cat([c["c_crossattn"] for c in conds]),
            pooled=_pooled(conds),
            timestep=patcher.model.process_timestep(timestep),
            guidance=torch.cat([c["guidance"] for c in conds]) if all("guidance" in c for c in conds) else None,
        )

    def cut(self, latent: Tensor, keep: int) -> Patches:
        """latent: (C, H, W) with even sides → the first `keep` of its tokens in row order, and their positions."""
        channels, height, width = latent.shape
        h, w = height // FLUX.patch, width // FLUX.patch
        patches = latent.reshape(channels, h, FLUX.patch, w, FLUX.patch).permute(1, 3, 0, 2, 4)
        tokens = patches.reshape(h * w, channels * FLUX.patch * FLUX.patch)
        rows = torch.arange(h, dtype=torch.float32, device=latent.device).repeat_interleave(w)
        columns = torch.arange(w, dtype=torch.float32, device=latent.device).repeat(h)
        positions = torch.stack((torch.zeros_like(rows), rows, columns), dim=-1)
        return Patches(tokens[:keep], positions[:keep])


def _pooled(conds: Sequence[dict[str, Tensor]]) -> Tensor | None:
    """(B, P); a sample without pooled text has zeros, as core gives it."""
    known = [c["y"] for c in conds if "y" in c]
    return torch.cat([c.get("y", torch.zeros_like(known[0])) for c in conds]) if known else None

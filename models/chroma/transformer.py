"""Chroma's transformer over the weights of ComfyUI's `comfy.ldm.chroma.model.Chroma`: FLUX's blocks, which take their
modulation from one network, the approximator.

B samples, N tokens of the picture, L of its text, D hidden. Text follows the picture in the joint sequence, so that a
caption's pads are a sample's last tokens, which no other token attends to.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...memory.weights.frozen import FrozenWeights
from ...memory.weights.residency import FrozenModule
from ..family import ModelInputs, RunBlock
from ..flux.blocks import JointBlock, ParallelBlock
from ..flux.layers import Embedder
from ..flux.transformer import FluxBackbone
from ..layers.attention import RaggedAttention
from ..layers.frozen import RMSNorm
from ..layers.lora_linear import LoraLinear, Masks
from ..layers.math import modulate, rope, timestep_embedding

APPROXIMATOR = "distilled_guidance_layer"
VECTORS = 344  # for 38 single blocks, 19 double blocks and the final layer; core computes them whatever the depth


@dataclass(frozen=True, kw_only=True)
class ChromaInputs(ModelInputs):
    """One batch for Chroma's transformer.

    positions: (B, N + L, 3), zero for the text.
    lengths: (B,), int64 on the CPU, the tokens of each sample without its caption's pads.
    guidance: (B,).
    """

    on_host = ("lengths",)

    positions: Tensor
    lengths: Tensor
    guidance: Tensor


class ChromaDoubleBlock(JointBlock):
    """FLUX's, which takes its modulation and masks pads."""

    modulated = False
    text_first = False

    def forward(
        self, img: Tensor, txt: Tensor, img_mod: Tensor, txt_mod: Tensor, pe: Tensor, bounds: Tensor, masks: Masks
    ) -> tuple[Tensor, Tensor]:
        """Run the block. img: (B, N, D), txt: (B, L, D), img_mod and txt_mod: (B, 1, 6·D), pe: (B, N + L, 1, head/2,
        2), bounds: as the attention takes them."""
        return self.run(img, txt, img_mod, txt_mod, pe, img.shape[1], masks, bounds)


class ChromaSingleBlock(ParallelBlock):
    """FLUX's, which takes its modulation and masks pads."""

    modulated = False

    def forward(self, x: Tensor, modulation: Tensor, pe: Tensor, bounds: Tensor, masks: Masks) -> Tensor:
        """Run the block. x: (B, N + L, D), modulation: (B, 1, 3·D), pe: (B, N + L, 1, head/2, 2), bounds: as the
        attention takes them."""
        return self.run(x, modulation, pe, x.shape[1], masks, bounds)


class Approximator(nn.Module):
    """The network that computes every modulation vector from timestep, guidance and the vector's index. It is frozen: a
    LoRA on it would change all blocks at once."""

    def __init__(self, weights: FrozenWeights, model: Any):
        super().__init__()
        self.in_proj = LoraLinear(weights, f"{APPROXIMATOR}.in_proj")
        count = range(len(model.layers))
        self.layers = nn.ModuleList(Embedder(weights, f"{APPROXIMATOR}.layers.{i}") for i in count)
        self.norms = nn.ModuleList(RMSNorm(weights, f"{APPROXIMATOR}.norms.{i}", model.norms[i].eps) for i in count)
        self.out_proj = LoraLinear(weights, f"{APPROXIMATOR}.out_proj")

    @torch.no_grad()
    def forward(self, timestep: Tensor, guidance: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the vectors: timestep (B,), guidance (B,), in the dtypes that core embeds them in → (B, 344, D) in
        `dtype`."""
        level = torch.cat((timestep_embedding(timestep, 16).to(dtype), timestep_embedding(guidance, 16).to(dtype)), -1)
        number = torch.arange(VECTORS, dtype=torch.float32, device=timestep.device)
        index = timestep_embedding(number, 32).to(dtype)
        parts = level[:, None].expand(-1, VECTORS, -1), index.expand(len(level), -1, -1)
        x = self.in_proj(torch.cat(parts, dim=-1))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return self.out_proj(x)


class ChromaTransformer(FluxBackbone):
    """Chroma with its weights frozen, ready for LoRA."""

    double = ChromaDoubleBlock
    single = ChromaSingleBlock

    def __init__(self, weights: FrozenWeights, model: Any, attention: RaggedAttention):
        super().__init__(weights, model, attention.attend)
        self.bounds = attention.bounds
        self.approximator = Approximator(weights, model.distilled_guidance_layer)

    def frozen_modules(self) -> list[FrozenModule]:
        approximator_modules = [module for module in self.approximator.modules() if isinstance(module, FrozenModule)]
        return [*super().frozen_modules(), *approximator_modules]

    def forward(self, run: RunBlock, inputs: ModelInputs) -> Tensor:
        """Compute the velocity of the sample's tokens, (B, N, C·patch)."""
        assert isinstance(inputs, ChromaInputs)
        vectors = self.approximator(inputs.timestep, inputs.guidance, self.dtype)
        pe = rope(inputs.positions, self.axes_dim, self.theta)
        bounds = self.bounds(inputs.lengths, pe.shape[1], pe.device)
        img, txt = self.img_in(inputs.tokens), self.txt_in(inputs.text)
        if torch.is_grad_enabled():
            # The first block must look like the others to the compiler: its inputs require grad too.
            img, txt = (x if x.requires_grad else x.requires_grad_() for x in (img, txt))

        def modulation(first: int, count: int) -> Tensor:
            return vectors[:, first : first + count].flatten(1)[:, None]

        # Order of the vectors: single blocks, double blocks' pictures, double blocks' text, the final layer.
        image_start = 3 * len(self.single_blocks)
        text_start = image_start + 6 * len(self.double_blocks)
        for i, block in enumerate(self.double_blocks):
            img, txt = run(
                block, img, txt, modulation(image_start + 6 * i, 6), modulation(text_start + 6 * i, 6), pe, bounds
            )
        x = torch.cat((img, txt), dim=1)
        for i, single in enumerate(self.single_blocks):
            x = run(single, x, modulation(3 * i, 3), pe, bounds)
        return self.final_linear(modulate(x[:, : img.shape[1]], vectors[:, -2:-1], vectors[:, -1:]))

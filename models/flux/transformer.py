"""FLUX.1: the transformer of black-forest-labs/flux over the weights of ComfyUI's `comfy.ldm.flux.model.Flux`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...memory.frozen import FrozenWeights
from ...memory.residency import FrozenModule
from ..attention import Attention
from ..family import Block, ModelInputs, RunBlock
from ..lora_linear import LoraLinear
from ..math import finite_in_fp16, modulate, rope, timestep_embedding
from .blocks import DoubleBlock, SingleBlock
from .layers import Embedder, QKNorm


@dataclass(frozen=True, kw_only=True)
class FluxInputs(ModelInputs):
    """positions: (B, N, 3) ids of the kept tokens; pooled: (B, P) or None; guidance: (B,) or None."""

    positions: Tensor
    pooled: Tensor | None
    guidance: Tensor | None


class FluxTransformer:
    """FLUX.1 with its weights frozen, ready for LoRA."""

    def __init__(self, weights: FrozenWeights, flux: Any, attention: Attention):
        self.axes_dim, self.theta = tuple(flux.params.axes_dim), flux.params.theta
        self.dtype = weights.compute_dtype
        self.img_in = LoraLinear(weights, "img_in")
        self.txt_in = LoraLinear(weights, "txt_in")
        self.time_in = Embedder(weights, "time_in")
        self.vector_in = Embedder(weights, "vector_in") if flux.vector_in is not None else None
        self.guidance_in = Embedder(weights, "guidance_in") if flux.params.guidance_embed else None
        self.double_blocks = [
            DoubleBlock(weights, f"double_blocks.{i}", b, attention) for i, b in enumerate(flux.double_blocks)
        ]
        self.single_blocks = [
            SingleBlock(weights, f"single_blocks.{i}", b, attention) for i, b in enumerate(flux.single_blocks)
        ]
        self.final_modulation = LoraLinear(weights, "final_layer.adaLN_modulation.1")
        self.final_linear = LoraLinear(weights, "final_layer.linear")

    def blocks(self) -> list[tuple[str, Block]]:
        double = [(f"double_blocks.{i}", block) for i, block in enumerate(self.double_blocks)]
        single = [(f"single_blocks.{i}", block) for i, block in enumerate(self.single_blocks)]
        return [*double, *single]

    def linears(self) -> dict[str, LoraLinear]:
        """Every Linear by the model's own module name."""
        found = {f"{p}.{b.native_name(n)}": lin for p, b in self.blocks() for n, lin in b.linears().items()}
        outer = {"img_in": self.img_in, "txt_in": self.txt_in, "final_layer.linear": self.final_linear}
        outer["final_layer.adaLN_modulation.1"] = self.final_modulation
        for name in ("time_in", "vector_in", "guidance_in"):
            if (embedder := getattr(self, name)) is not None:
                outer |= {f"{name}.in_layer": embedder.in_layer, f"{name}.out_layer": embedder.out_layer}
        return found | outer

    def frozen_modules(self) -> list[FrozenModule]:
        norms = [m for _, block in self.blocks() for m in block.modules() if isinstance(m, QKNorm)]
        return [*self.linears().values(), *norms]

    def embed(self, inputs: FluxInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """→ img (B, N, D), txt (B, L, D), vec (B, D), pe (B, 1, L + N, head/2, 2)."""
        img = self.img_in(inputs.tokens)
        vec = self.time_in(timestep_embedding(inputs.timestep).to(self.dtype))
        if self.guidance_in is not None and inputs.guidance is not None:
            vec = vec + self.guidance_in(timestep_embedding(inputs.guidance).to(self.dtype))
        if self.vector_in is not None:
            width = self.vector_in.in_layer.weight.shape[1]
            pooled = inputs.pooled
            vec = vec + self.vector_in(vec.new_zeros(vec.shape[0], width) if pooled is None else pooled[:, :width])
        txt = self.txt_in(inputs.text)
        text_positions = inputs.positions.new_zeros(*inputs.text.shape[:2], inputs.positions.shape[-1])
        pe = rope(torch.cat((text_positions, inputs.positions), dim=1), self.axes_dim, self.theta)
        return img, txt, vec, pe

    def head(self, img: Tensor, vec: Tensor) -> Tensor:
        """img: (B, N, D) → velocity (B, N, C·patch)."""
        shift, scale = self.final_modulation(F.silu(vec)[:, None]).chunk(2, dim=-1)
        return self.final_linear(modulate(img, shift, scale))

    def forward(self, run: RunBlock, inputs: ModelInputs) -> Tensor:
        assert isinstance(inputs, FluxInputs)
        img, txt, vec, pe = self.embed(inputs)
        if torch.is_grad_enabled():
            # The first block must look like the others to the compiler: its inputs require grad too.
            img, txt = (x if x.requires_grad else x.requires_grad_() for x in (img, txt))
        silu_vec = F.silu(vec)[:, None]
        for block in self.double_blocks:
            img, txt = run(block, img, txt, silu_vec, pe)
        x = torch.cat((txt, finite_in_fp16(img)), dim=1)
        for single in self.single_blocks:
            x = run(single, x, silu_vec, pe)
        return self.head(x[:, txt.shape[1] :], vec)

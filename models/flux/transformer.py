"""FLUX's transformers (black-forest-labs/flux and flux2) over the weights of `comfy.ldm.flux.model.Flux`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...memory.weights.frozen import FrozenWeights
from ...memory.weights.residency import FrozenModule
from ..family import Block, ModelInputs, OwnTransformer, RunBlock
from ..layers.attention import Attention
from ..layers.frozen import RMSNorm
from ..layers.lora_linear import LoraLayer, LoraLinear
from ..layers.math import finite_in_fp16, modulate, rope, timestep_embedding
from .blocks import DoubleBlock, DoubleBlock2, JointBlock, ParallelBlock, SingleBlock, SingleBlock2
from .layers import Embedder


@dataclass(frozen=True, kw_only=True)
class FluxInputs(ModelInputs):
    """One batch for the transformers of FLUX.

    positions: (B, N + R, axes) ids of the sample's tokens and of the references'.
    pooled: (B, P) pooled text, or None.
    guidance: (B,) or None.
    reference_timestep: (B,) fp32, the timestep of reference tokens, or None if it is that of all others.
    text_mask: (B, L), False for the pads of captions, or None if no text has pads that the model leaves out.
    """

    positions: Tensor
    pooled: Tensor | None
    guidance: Tensor | None
    reference_timestep: Tensor | None = None
    text_mask: Tensor | None = None


@dataclass(frozen=True)
class SharedInputs:
    """Inputs that all blocks of a forward share.

    vec: (B, 1 or 2, D) after SiLU, a second row for the references.
    pe: (B, L + N + R, 1, head/2, 2).
    sample_tokens: N.
    key_mask: (B, 1, 1, L + N + R), False for pads of the text, or None.
    """

    vec: Tensor
    pe: Tensor
    sample_tokens: int
    key_mask: Tensor | None


class FluxBackbone(OwnTransformer):
    """The blocks of a FLUX-like model, and the Linears before and after them, frozen and ready for LoRA."""

    double: type[JointBlock]
    single: type[ParallelBlock]

    def __init__(self, weights: FrozenWeights, flux: Any, attention: Callable[..., Tensor]):
        self.axes_dim, self.theta = tuple(flux.params.axes_dim), flux.params.theta
        self.dtype = weights.compute_dtype
        self.img_in = LoraLinear(weights, "img_in")
        self.txt_in = LoraLinear(weights, "txt_in")
        self.double_blocks = [
            self.double(weights, f"double_blocks.{i}", b, attention) for i, b in enumerate(flux.double_blocks)
        ]
        self.single_blocks = [
            self.single(weights, f"single_blocks.{i}", b, attention) for i, b in enumerate(flux.single_blocks)
        ]
        self.final_linear = LoraLinear(weights, "final_layer.linear")

    def blocks(self) -> list[tuple[str, Block]]:
        double = [(f"double_blocks.{i}", block) for i, block in enumerate(self.double_blocks)]
        single = [(f"single_blocks.{i}", block) for i, block in enumerate(self.single_blocks)]
        return [*double, *single]

    def linears(self) -> dict[str, LoraLayer]:
        """Return every Linear by the model's own module name."""
        linears = {f"{p}.{b.native_name(n)}": lin for p, b in self.blocks() for n, lin in b.linears().items()}
        return linears | {"img_in": self.img_in, "txt_in": self.txt_in, "final_layer.linear": self.final_linear}

    def frozen_modules(self) -> list[FrozenModule]:
        norms = [m for _, block in self.blocks() for m in block.modules() if isinstance(m, RMSNorm)]
        return [*self.linears().values(), *norms]


class FluxTransformer(FluxBackbone):
    """FLUX.1 with its weights frozen, ready for LoRA."""

    double: type[JointBlock] = DoubleBlock
    single: type[ParallelBlock] = SingleBlock

    def __init__(self, weights: FrozenWeights, flux: Any, attention: Attention):
        super().__init__(weights, flux, attention)
        self.text_axes = tuple(flux.params.txt_ids_dims)
        self.time_in = Embedder(weights, "time_in")
        self.vector_in = Embedder(weights, "vector_in") if flux.vector_in is not None else None
        self.guidance_in = Embedder(weights, "guidance_in") if flux.params.guidance_embed else None
        self.final_modulation = LoraLinear(weights, "final_layer.adaLN_modulation.1")

    def linears(self) -> dict[str, LoraLayer]:
        linears = super().linears() | {"final_layer.adaLN_modulation.1": self.final_modulation}
        for name in ("time_in", "vector_in", "guidance_in"):
            if (embedder := getattr(self, name)) is not None:
                linears |= {f"{name}.in_layer": embedder.in_layer, f"{name}.out_layer": embedder.out_layer}
        return linears

    def embed(self, inputs: FluxInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Embed the inputs → img (B, N + R, D), txt (B, L, D), vec (B, 1 or 2, D) after SiLU, a second row for the
        references, and pe (B, L + N + R, 1, head/2, 2)."""
        references = () if inputs.references is None else (inputs.references,)
        img = self.img_in(torch.cat((inputs.tokens, *references), dim=1))
        times = [inputs.timestep] if inputs.reference_timestep is None else [inputs.timestep, inputs.reference_timestep]
        waves = torch.stack([timestep_embedding(t) for t in times], dim=1).to(self.dtype)
        vec = self.time_in(waves)
        if self.guidance_in is not None and inputs.guidance is not None:
            vec = vec + self.guidance_in(timestep_embedding(inputs.guidance).to(self.dtype))[:, None]
        if self.vector_in is not None:
            width = self.vector_in.in_layer.shape[1]
            pooled = inputs.pooled
            vec = vec + self.vector_in(vec.new_zeros(len(vec), width) if pooled is None else pooled[:, :width])[:, None]
        txt = self.txt_in(inputs.text)
        positions = torch.cat((self.text_positions(inputs), inputs.positions), dim=1)
        return img, txt, F.silu(vec), rope(positions, self.axes_dim, self.theta)

    def text_positions(self, inputs: FluxInputs) -> Tensor:
        """Make the text's positions, (B, L, axes): zero, except along the axes that count text tokens."""
        batch, length = inputs.text.shape[:2]
        counted = torch.arange(length, dtype=inputs.positions.dtype, device=inputs.positions.device)
        axes = [counted if axis in self.text_axes else torch.zeros_like(counted) for axis in range(len(self.axes_dim))]
        return torch.stack(axes, dim=-1).expand(batch, -1, -1)

    def run_blocks(self, run: RunBlock, img: Tensor, txt: Tensor, shared: SharedInputs) -> Tensor:
        """Run all blocks: img (B, N + R, D), txt (B, L, D) → both, (B, L + N + R, D)."""
        for block in self.double_blocks:
            img, txt = run(block, img, txt, shared.vec, shared.pe, shared.key_mask)
        x = torch.cat((txt, finite_in_fp16(img)), dim=1)
        for single in self.single_blocks:
            x = run(single, x, shared.vec, shared.pe, shared.key_mask)
        return x

    def head(self, img: Tensor, vec: Tensor) -> Tensor:
        """Run the final layer: img (B, N, D), vec (B, 1, D) → velocity (B, N, C·patch)."""
        shift, scale = self.final_modulation(vec).chunk(2, dim=-1)
        return self.final_linear(modulate(img, shift, scale))

    def forward(self, run: RunBlock, inputs: ModelInputs) -> Tensor:
        """Compute the velocity of the sample's own tokens, (B, N, C·patch)."""
        assert isinstance(inputs, FluxInputs)
        img, txt, vec, pe = self.embed(inputs)
        sample_tokens, text = inputs.tokens.shape[1], txt.shape[1]
        if torch.is_grad_enabled():
            # The first block must look like the others to the compiler: its inputs require grad too.
            img, txt = (x if x.requires_grad else x.requires_grad_() for x in (img, txt))
        key_mask = None
        if inputs.text_mask is not None:
            key_mask = F.pad(inputs.text_mask, (0, img.shape[1]), value=True)[:, None, None]
        x = self.run_blocks(run, img, txt, SharedInputs(vec, pe, sample_tokens, key_mask))
        return self.head(x[:, text : text + sample_tokens], vec[:, :1])


class Flux2Transformer(FluxTransformer):
    """FLUX.2: blocks of a kind share one modulation, computed once per step."""

    double: type[JointBlock] = DoubleBlock2
    single: type[ParallelBlock] = SingleBlock2

    def __init__(self, weights: FrozenWeights, flux: Any, attention: Attention):
        super().__init__(weights, flux, attention)
        self.img_modulation = LoraLinear(weights, "double_stream_modulation_img.lin")
        self.txt_modulation = LoraLinear(weights, "double_stream_modulation_txt.lin")
        self.single_modulation = LoraLinear(weights, "single_stream_modulation.lin")

    def linears(self) -> dict[str, LoraLayer]:
        return super().linears() | {
            "double_stream_modulation_img.lin": self.img_modulation,
            "double_stream_modulation_txt.lin": self.txt_modulation,
            "single_stream_modulation.lin": self.single_modulation,
        }

    def run_blocks(self, run: RunBlock, img: Tensor, txt: Tensor, shared: SharedInputs) -> Tensor:
        img_mod, txt_mod = self.img_modulation(shared.vec), self.txt_modulation(shared.vec[:, :1])
        single_mod = self.single_modulation(shared.vec)
        for block in self.double_blocks:
            img, txt = run(block, img, txt, img_mod, txt_mod, shared.pe, shared.sample_tokens, shared.key_mask)
        x = torch.cat((txt, finite_in_fp16(img)), dim=1)
        reference_start = txt.shape[1] + shared.sample_tokens
        for single in self.single_blocks:
            x = run(single, x, single_mod, shared.pe, reference_start, shared.key_mask)
        return x

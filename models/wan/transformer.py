"""Wan's transformer (Wan-Video/Wan2.1, Wan2.2) over the weights of ComfyUI's `comfy.ldm.wan.model.WanModel`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...memory.weights.frozen import FrozenWeights
from ...memory.weights.residency import FrozenModule
from ..family import Block, ModelInputs, OwnTransformer, RunBlock
from ..layers.attention import Attention
from ..layers.frozen import FrozenTensors, LayerNorm
from ..layers.lora_linear import LoraLayer, LoraLinear
from ..layers.math import rope
from .blocks import FrameBlock, ImageBlock, TextBlock
from .layers import Modulation, PatchEmbedding, modulate_frames, sinusoid


@dataclass(frozen=True, kw_only=True)
class WanInputs(ModelInputs):
    """One batch for Wan's transformer.

    timestep: (B, 1), or (B, 2) if the model takes clean frames: that of the noisy frames, and 0.
    positions: (B, N, 3) frame, row and column of the tokens.
    image: (B, I, 1280) of CLIP vision, or None.
    clean: (B, N, 1), true for the tokens of clean frames, or None if the model takes none.
    text_mask: (B, L), False for the pads of captions, or None if no text has pads that the model leaves out.
    """

    positions: Tensor
    image: Tensor | None = None
    clean: Tensor | None = None
    text_mask: Tensor | None = None


class ImagePositions(FrozenTensors):
    """Position embedding that distinguishes the tokens of the first and last picture, in models that take both."""

    emb_pos: Tensor

    def __init__(self, weights: FrozenWeights):
        super().__init__(weights, "img_emb", "emb_pos")

    def forward(self, image: Tensor) -> Tensor:
        return image[:, : self.emb_pos.shape[1]] + self.emb_pos[:, : image.shape[1]]


class ImageEmbedding(nn.Module):
    """Projection of CLIP vision's states to the model's width, as context."""

    def __init__(self, weights: FrozenWeights, core: Any):
        super().__init__()
        self.norm_in = LayerNorm(weights, "img_emb.proj.0", core.proj[0].eps)
        self.linear_in = LoraLinear(weights, "img_emb.proj.1")
        self.linear_out = LoraLinear(weights, "img_emb.proj.3")
        self.norm_out = LayerNorm(weights, "img_emb.proj.4", core.proj[4].eps)
        self.positions = None if core.emb_pos is None else ImagePositions(weights)

    def forward(self, image: Tensor) -> Tensor:
        if self.positions is not None:
            image = self.positions(image)
        return self.norm_out(self.linear_out(F.gelu(self.linear_in(self.norm_in(image)))))


class WanTransformer(OwnTransformer):
    """Wan with its weights frozen, ready for LoRA."""

    def __init__(self, weights: FrozenWeights, core: Any, attention: Attention, takes_clean_frames: bool):
        self.dtype, self.freq_dim = weights.compute_dtype, core.freq_dim
        self.axes_dim, self.theta = tuple(core.rope_embedder.axes_dim), core.rope_embedder.theta
        self.patch_embedding = PatchEmbedding(weights)
        self.text_embedding = [LoraLinear(weights, f"text_embedding.{n}") for n in (0, 2)]
        self.time_embedding = [LoraLinear(weights, f"time_embedding.{n}") for n in (0, 2)]
        self.time_projection = LoraLinear(weights, "time_projection.1")
        self.img_emb = None if core.img_emb is None else ImageEmbedding(weights, core.img_emb)
        kind = FrameBlock if takes_clean_frames else TextBlock if self.img_emb is None else ImageBlock
        self._blocks = [kind(weights, f"blocks.{i}", block, attention) for i, block in enumerate(core.blocks)]
        self.head_modulation = Modulation(weights, "head")
        self.head = LoraLinear(weights, "head.head")

    def blocks(self) -> list[tuple[str, Block]]:
        return [(f"blocks.{i}", block) for i, block in enumerate(self._blocks)]

    def linears(self) -> dict[str, LoraLayer]:
        """Return every Linear by the model's own module name."""
        linears = {
            f"{name}.{suffix}": linear for name, block in self.blocks() for suffix, linear in block.linears().items()
        }
        for name in ("text_embedding", "time_embedding"):
            linears |= {f"{name}.0": getattr(self, name)[0], f"{name}.2": getattr(self, name)[1]}
        if self.img_emb is not None:
            linears |= {"img_emb.proj.1": self.img_emb.linear_in, "img_emb.proj.3": self.img_emb.linear_out}
        return linears | {"time_projection.1": self.time_projection, "head.head": self.head}

    def frozen_modules(self) -> list[FrozenModule]:
        outer = [self.patch_embedding, *self.text_embedding, *self.time_embedding, self.time_projection]
        owners = nn.ModuleList((*outer, *self._blocks, self.head_modulation, self.head))
        if self.img_emb is not None:
            owners.append(self.img_emb)
        return [module for module in owners.modules() if isinstance(module, FrozenModule)]

    def embed(self, inputs: WanInputs) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Embed the inputs → x (B, N, D), e (B, F, D), its projection (B, F, 6, D), and the context: text (B, L, D),
        and the image (B, I, D) if the model uses it. F: 1, or 2 if the model takes clean frames."""
        x = self.patch_embedding(inputs.tokens)
        waves = sinusoid(inputs.timestep.flatten(), self.freq_dim).to(self.dtype)
        e = self.time_embedding[1](F.silu(self.time_embedding[0](waves))).unflatten(0, inputs.timestep.shape)
        projected = self.time_projection(F.silu(e)).unflatten(-1, (6, -1))
        text = self.text_embedding[1](F.gelu(self.text_embedding[0](inputs.text), approximate="tanh"))
        if self.img_emb is None:
            return x, e, projected, [text]
        assert inputs.image is not None
        return x, e, projected, [text, self.img_emb(inputs.image)]

    def final(self, x: Tensor, e: Tensor, clean: Tensor | None) -> Tensor:
        """Run the head: x (B, N, D) → velocity (B, N, 4·C)."""
        shift, scale = self.head_modulation(e.unsqueeze(2))
        return self.head(modulate_frames(x, shift, scale, clean))

    def forward(self, run: RunBlock, inputs: ModelInputs) -> Tensor:
        assert isinstance(inputs, WanInputs)
        x, e, projected, context = self.embed(inputs)
        pe = rope(inputs.positions, self.axes_dim, self.theta)
        if torch.is_grad_enabled() and not x.requires_grad:
            # The first block must look like the others to the compiler: its input requires grad too.
            x = x.requires_grad_()
        text, *extra_context = context
        key_mask = None if inputs.text_mask is None else inputs.text_mask[:, None, None]
        if inputs.clean is not None:
            extra_context.append(inputs.clean)
        for block in self._blocks:
            x = run(block, x, projected, pe, text, key_mask, *extra_context)
        return self.final(x, e, inputs.clean)

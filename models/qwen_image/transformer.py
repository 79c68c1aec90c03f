"""The transformer of Qwen-Image: blocks over frozen weights, and the layers before and after them."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...memory.weights.frozen import FrozenWeights
from ...memory.weights.residency import FrozenModule
from ..family import Block, ModelInputs, OwnTransformer, RunBlock
from ..layers.attention import RaggedAttention
from ..layers.frozen import RMSNorm
from ..layers.lora_linear import LoraLayer, LoraLinear, Masks, masks_of, run_together
from ..layers.math import gate_parts, modulate, modulate_parts, rope
from ..layers.norm_rope import norm_rope

Modulation = tuple[Tensor, Tensor, Tensor]
"""shift, scale and gate, each (B, 1, D), or (B, 2, D) with a row for the tokens of references."""


@dataclass(frozen=True, kw_only=True)
class QwenInputs(ModelInputs):
    """One batch for Qwen-Image's transformer.

    positions: (B, N + R + L, 3).
    lengths: (B,), int64 on the CPU, the tokens of each sample without its text's pads.
    reference_timestep: (B,) fp32, the timestep of reference tokens, or None if there are none.
    """

    on_host = ("lengths",)

    positions: Tensor
    lengths: Tensor
    reference_timestep: Tensor | None


NATIVE = {
    "img": {"q": "attn.to_q", "k": "attn.to_k", "v": "attn.to_v", "proj": "attn.to_out.0"},
    "txt": {"q": "attn.add_q_proj", "k": "attn.add_k_proj", "v": "attn.add_v_proj", "proj": "attn.to_add_out"},
}
for _side, _names in NATIVE.items():
    _names |= {"mod": f"{_side}_mod.1", "mlp_in": f"{_side}_mlp.net.0.proj", "mlp_out": f"{_side}_mlp.net.2"}
NORMS = {"img": ("norm_q", "norm_k"), "txt": ("norm_added_q", "norm_added_k")}


class QwenStream(nn.Module):
    """One half of a block: the layers of the pictures' tokens or of the text's."""

    def __init__(self, weights: FrozenWeights, prefix: str, side: str, block: Any):
        super().__init__()
        linear = {layer: LoraLinear(weights, f"{prefix}.{name}") for layer, name in NATIVE[side].items()}
        self.q, self.k, self.v, self.proj = (linear[layer] for layer in ("q", "k", "v", "proj"))
        self.mod, self.mlp_in, self.mlp_out = (linear[layer] for layer in ("mod", "mlp_in", "mlp_out"))
        q_norm, k_norm = NORMS[side]
        self.norm_q = RMSNorm(weights, f"{prefix}.attn.{q_norm}", getattr(block.attn, q_norm).eps)
        self.norm_k = RMSNorm(weights, f"{prefix}.attn.{k_norm}", getattr(block.attn, k_norm).eps)
        self.num_heads = block.num_attention_heads

    def heads(self, x: Tensor, first: Modulation, reference_start: int, masks: Masks) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, T, D) to q and k before their norm, and v, each (B, T, H, head)."""
        x = modulate_parts(x, first[0], first[1], reference_start)
        qkv = run_together((self.q, self.k, self.v), x, [masks.get(name) for name in "qkv"])
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in qkv)
        return q, k, v

    def after_attention(
        self, x: Tensor, attended: Tensor, first: Modulation, second: Modulation, reference_start: int, masks: Masks
    ) -> Tensor:
        x = gate_parts(x, self.proj(attended, masks.get("proj")), first[2], reference_start)
        mlp_hidden = F.gelu(
            self.mlp_in(modulate_parts(x, second[0], second[1], reference_start), masks.get("mlp_in")),
            approximate="tanh",
        )
        return gate_parts(x, self.mlp_out(mlp_hidden, masks.get("mlp_out")), second[2], reference_start)


class QwenBlock(Block):
    """Pictures and text with separate weights, joined in attention."""

    kind = "block"

    def __init__(self, weights: FrozenWeights, prefix: str, block: Any, attention: RaggedAttention):
        super().__init__()
        self.img = QwenStream(weights, prefix, "img", block)
        self.txt = QwenStream(weights, prefix, "txt", block)
        self.attend = attention.attend

    def native_name(self, name: str) -> str:
        side, _, layer = name.partition(".")
        return NATIVE[side][layer]

    def lora_rows(self, inputs: ModelInputs) -> dict[str, int]:
        assert isinstance(inputs, QwenInputs)
        rows = {"img": inputs.image_tokens, "txt": inputs.text_tokens}
        rows |= {"img.mod": 1 if inputs.reference_timestep is None else 2, "txt.mod": 1}
        return {name: rows.get(name, rows[name.partition(".")[0]]) for name in self.linears()}

    def forward(
        self, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor, bounds: Tensor, reference_start: int, masks: Masks
    ) -> tuple[Tensor, Tensor]:
        """Run the block. img: (B, N + R, D); txt: (B, L, D); vec: (B, 1 or 2, D) after SiLU, its second row for the
        references; pe: (B, N + R + L, 1, head/2, 2); bounds: as the attention takes them; reference_start: N."""
        img_masks, txt_masks = masks_of("img.", masks), masks_of("txt.", masks)
        img_mod = self.img.mod(vec, img_masks.get("mod")).chunk(6, dim=-1)
        txt_mod = self.txt.mod(vec[:, :1], txt_masks.get("mod")).chunk(6, dim=-1)
        img_heads = self.img.heads(img, img_mod[:3], reference_start, img_masks)
        txt_heads = self.txt.heads(txt, txt_mod[:3], reference_start, txt_masks)
        qs, ks, vs = zip(img_heads, txt_heads, strict=True)
        q = norm_rope(qs, (self.img.norm_q.weight, self.txt.norm_q.weight), pe, self.img.norm_q.eps)
        k = norm_rope(ks, (self.img.norm_k.weight, self.txt.norm_k.weight), pe, self.img.norm_k.eps)
        v = torch.cat(vs, dim=1)
        attended = self.attend(q, k, v, bounds)
        img_attended, txt_attended = attended.split((img.shape[1], txt.shape[1]), dim=1)
        img = self.img.after_attention(img, img_attended, img_mod[:3], img_mod[3:], reference_start, img_masks)
        txt = self.txt.after_attention(txt, txt_attended, txt_mod[:3], txt_mod[3:], reference_start, txt_masks)
        return img, txt


class QwenTransformer(OwnTransformer):
    """Qwen-Image with its weights frozen, ready for LoRA."""

    def __init__(self, weights: FrozenWeights, model: Any, attention: RaggedAttention):
        self.axes_dim, self.theta = tuple(model.pe_embedder.axes_dim), model.pe_embedder.theta
        self.dtype = weights.compute_dtype
        self.attention = attention
        self.img_in = LoraLinear(weights, "img_in")
        self.txt_norm = RMSNorm(weights, "txt_norm", model.txt_norm.eps)
        self.txt_in = LoraLinear(weights, "txt_in")
        self.time_in = LoraLinear(weights, "time_text_embed.timestep_embedder.linear_1")
        self.time_out = LoraLinear(weights, "time_text_embed.timestep_embedder.linear_2")
        self.transformer_blocks = [
            QwenBlock(weights, f"transformer_blocks.{i}", b, attention) for i, b in enumerate(model.transformer_blocks)
        ]
        self.norm_out = LoraLinear(weights, "norm_out.linear")
        self.proj_out = LoraLinear(weights, "proj_out")

    def blocks(self) -> list[tuple[str, Block]]:
        return [(f"transformer_blocks.{i}", block) for i, block in enumerate(self.transformer_blocks)]

    def linears(self) -> dict[str, LoraLayer]:
        """Return every Linear by the model's own module name."""
        linears = {f"{p}.{b.native_name(n)}": lin for p, b in self.blocks() for n, lin in b.linears().items()}
        embedder = "time_text_embed.timestep_embedder"
        return linears | {
            "img_in": self.img_in,
            "txt_in": self.txt_in,
            f"{embedder}.linear_1": self.time_in,
            f"{embedder}.linear_2": self.time_out,
            "norm_out.linear": self.norm_out,
            "proj_out": self.proj_out,
        }

    def frozen_modules(self) -> list[FrozenModule]:
        norms = [m for _, block in self.blocks() for m in block.modules() if isinstance(m, RMSNorm)]
        return [*self.linears().values(), *norms, self.txt_norm]

    def embed(self, inputs: QwenInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Embed the inputs → img (B, N + R, D), txt (B, L, D), vec (B, 1 or 2, D) after SiLU, pe (B, N + R + L, 1,
        head/2, 2)."""
        references = () if inputs.references is None else (inputs.references,)
        img = self.img_in(torch.cat((inputs.tokens, *references), dim=1))
        txt = self.txt_in(self.txt_norm(inputs.text))
        times = [inputs.timestep] if inputs.reference_timestep is None else [inputs.timestep, inputs.reference_timestep]
        features = timestep_features(torch.stack(times, dim=1)).to(self.dtype)
        vec = F.silu(self.time_out(F.silu(self.time_in(features))))
        pe = rope(inputs.positions, self.axes_dim, self.theta).to(self.dtype).float()  # core rounds the table too
        return img, txt, vec, pe

    def head(self, img: Tensor, vec: Tensor) -> Tensor:
        """Run the final layer: img (B, N, D), vec (B, 1, D) → velocity (B, N, C·patch)."""
        scale, shift = self.norm_out(vec).chunk(2, dim=-1)
        return self.proj_out(modulate(img, shift, scale))

    def forward(self, run: RunBlock, inputs: ModelInputs) -> Tensor:
        assert isinstance(inputs, QwenInputs)
        img, txt, vec, pe = self.embed(inputs)
        bounds = self.attention.bounds(inputs.lengths, pe.shape[1], pe.device)
        sample_tokens = inputs.tokens.shape[1]
        if torch.is_grad_enabled():
            # The first block must look like the others to the compiler: its inputs require grad too.
            img, txt = (x if x.requires_grad else x.requires_grad_() for x in (img, txt))
        for block in self.transformer_blocks:
            img, txt = run(block, img, txt, vec, pe, bounds, sample_tokens)
        return self.head(img[:, :sample_tokens], vec[:, :1])


def timestep_features(t: Tensor) -> Tensor:
    """Embed timesteps, (…,) → (…, 256) fp32: cos then sin of 1000·t·10000^(−i/128), i = 0 … 127, multiplied in core's
    order."""
    exponent = -math.log(10000) * torch.arange(128, dtype=torch.float32, device=t.device) / 128
    angle = 1000 * (t.float()[..., None] * exponent.exp())
    return torch.cat((angle.cos(), angle.sin()), dim=-1)

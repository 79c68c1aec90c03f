"""FLUX's transformer blocks over the weights of ComfyUI's `comfy.ldm.flux.layers`.

ComfyUI's block forward adds to its inputs in place, which is wrong under autograd, and its attention wrapper does not
trace whole; so the blocks are written here again, without in-place operations, on SDPA.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...memory.frozen import FrozenWeights
from ..attention import Attention
from ..family import Block, ModelInputs
from ..lora_linear import LoraLinear
from ..math import finite_in_fp16, modulate, rotate
from .layers import QKNorm

Modulation = tuple[Tensor, Tensor, Tensor]


class Stream(nn.Module):
    """One half of a double block: the layers of the picture's tokens or of the text's."""

    def __init__(self, weights: FrozenWeights, prefix: str, side: str, block: Any):
        super().__init__()
        self.mod = LoraLinear(weights, f"{prefix}.{side}_mod.lin")
        self.qkv = LoraLinear(weights, f"{prefix}.{side}_attn.qkv")
        self.norm = QKNorm(weights, f"{prefix}.{side}_attn.norm", getattr(block, f"{side}_attn").norm.query_norm.eps)
        self.proj = LoraLinear(weights, f"{prefix}.{side}_attn.proj")
        self.mlp_in = LoraLinear(weights, f"{prefix}.{side}_mlp.0")
        self.mlp_out = LoraLinear(weights, f"{prefix}.{side}_mlp.2")
        self.num_heads = block.num_heads

    def heads(self, x: Tensor, modulation: Modulation, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x: (B, T, D) → normalised q and k, and v, each (B, H, T, head)."""
        qkv = self.qkv(modulate(x, modulation[0], modulation[1]), mask)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.norm(q, k)
        return q, k, v

    def after_attention(
        self, x: Tensor, attended: Tensor, first: Modulation, second: Modulation, masks: dict[str, Tensor]
    ) -> Tensor:
        x = x + first[2] * self.proj(attended, masks.get("proj"))
        hidden = F.gelu(self.mlp_in(modulate(x, second[0], second[1]), masks.get("mlp_in")), approximate="tanh")
        return x + second[2] * self.mlp_out(hidden, masks.get("mlp_out"))


class DoubleBlock(Block):
    """Picture and text with weights of their own, joined in attention. Text comes first in the joint sequence."""

    kind = "double"
    native = {"mod": "mod.lin", "qkv": "attn.qkv", "proj": "attn.proj", "mlp_in": "mlp.0", "mlp_out": "mlp.2"}

    def __init__(self, weights: FrozenWeights, prefix: str, block: Any, attention: Attention):
        super().__init__()
        self.img = Stream(weights, prefix, "img", block)
        self.txt = Stream(weights, prefix, "txt", block)
        self.attention = attention

    def native_name(self, name: str) -> str:
        side, _, layer = name.partition(".")
        return f"{side}_{self.native[layer]}"

    def lora_rows(self, inputs: ModelInputs) -> dict[str, int]:
        rows = {"img": inputs.image_tokens, "txt": inputs.text_tokens}
        return {name: 1 if name.endswith("mod") else rows[name.partition(".")[0]] for name in self.linears()}

    def forward(
        self, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor, masks: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """img: (B, N, D), txt: (B, L, D), vec: (B, 1, D) after SiLU, pe: (B, 1, L + N, head/2, 2)."""
        img_mod = self.img.mod(vec, masks.get("img.mod")).chunk(6, dim=-1)
        txt_mod = self.txt.mod(vec, masks.get("txt.mod")).chunk(6, dim=-1)
        img_q, img_k, img_v = self.img.heads(img, img_mod[:3], masks.get("img.qkv"))
        txt_q, txt_k, txt_v = self.txt.heads(txt, txt_mod[:3], masks.get("txt.qkv"))
        q = rotate(torch.cat((txt_q, img_q), dim=2), pe)
        k = rotate(torch.cat((txt_k, img_k), dim=2), pe)
        attended = self.attention(q, k, torch.cat((txt_v, img_v), dim=2))
        txt_attended, img_attended = attended.split((txt.shape[1], img.shape[1]), dim=1)
        img = self.img.after_attention(img, img_attended, img_mod[:3], img_mod[3:], _of("img.", masks))
        txt = self.txt.after_attention(txt, txt_attended, txt_mod[:3], txt_mod[3:], _of("txt.", masks))
        return img, finite_in_fp16(txt)


class SingleBlock(Block):
    """Attention and MLP in parallel on the joint sequence (arXiv 2302.05442)."""

    kind = "single"
    native = {"mod": "modulation.lin", "linear1": "linear1", "linear2": "linear2"}

    def __init__(self, weights: FrozenWeights, prefix: str, block: Any, attention: Attention):
        super().__init__()
        self.mod = LoraLinear(weights, f"{prefix}.modulation.lin")
        self.linear1 = LoraLinear(weights, f"{prefix}.linear1")
        self.linear2 = LoraLinear(weights, f"{prefix}.linear2")
        self.norm = QKNorm(weights, f"{prefix}.norm", block.norm.query_norm.eps)
        self.num_heads = block.num_heads
        self.attention = attention

    def native_name(self, name: str) -> str:
        return self.native[name]

    def lora_rows(self, inputs: ModelInputs) -> dict[str, int]:
        return {name: 1 if name == "mod" else inputs.image_tokens + inputs.text_tokens for name in self.linears()}

    def forward(self, x: Tensor, vec: Tensor, pe: Tensor, masks: dict[str, Tensor]) -> Tensor:
        """x: (B, L + N, D), vec: (B, 1, D) after SiLU."""
        shift, scale, gate = self.mod(vec, masks.get("mod")).chunk(3, dim=-1)
        width = x.shape[-1]
        joint = self.linear1(modulate(x, shift, scale), masks.get("linear1"))
        qkv, hidden = joint.split((3 * width, joint.shape[-1] - 3 * width), dim=-1)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.norm(q, k)
        attended = self.attention(rotate(q, pe), rotate(k, pe), v)
        hidden = torch.cat((attended, F.gelu(hidden, approximate="tanh")), dim=-1)
        return finite_in_fp16(x + gate * self.linear2(hidden, masks.get("linear2")))


def _of(prefix: str, masks: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): mask for name, mask in masks.items() if name.startswith(prefix)}

"""Wan's transformer block over the weights of `comfy.ldm.wan.model.WanAttentionBlock`, safe under autograd and without
graph breaks: core's attention wrapper reads free memory on the CPU and its RoPE has no backward."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ...memory.weights.frozen import FrozenWeights
from ..family import Block, ModelInputs
from ..layers.attention import Attention
from ..layers.frozen import LayerNorm, RMSNorm
from ..layers.lora_linear import LoraLinear, Masks, masks_of, run_together
from ..layers.norm_rope import rope_heads
from .layers import Modulation, gate_frames, modulate_frames


def _heads(x: Tensor, heads: int) -> Tensor:
    """Split heads: (B, T, D) → (B, T, H, D / H)."""
    return x.unflatten(-1, (heads, -1))


class SelfAttention(nn.Module):
    """Self-attention; queries and keys are normalised over all heads at once, then rotated by position."""

    def __init__(self, weights: FrozenWeights, prefix: str, core: Any, attention: Attention):
        super().__init__()
        self.q, self.k, self.v, self.o = (LoraLinear(weights, f"{prefix}.{n}") for n in "qkvo")
        self.norm_q = RMSNorm(weights, f"{prefix}.norm_q", core.eps)
        self.norm_k = RMSNorm(weights, f"{prefix}.norm_k", core.eps)
        self.num_heads = core.num_heads
        self.attention = attention

    def forward(self, x: Tensor, pe: Tensor, masks: Masks) -> Tensor:
        q, k, v = run_together((self.q, self.k, self.v), x, [masks.get(name) for name in "qkv"])
        q = rope_heads(_heads(self.norm_q(q), self.num_heads), pe)
        k = rope_heads(_heads(self.norm_k(k), self.num_heads), pe)
        return self.o(self.attention(q, k, _heads(v, self.num_heads)), masks.get("o"))


class CrossAttention(nn.Module):
    """Cross-attention to the text and, if the model has weights for it, to the start picture, in a separate
    attention."""

    def __init__(self, weights: FrozenWeights, prefix: str, core: Any, attention: Attention, with_image: bool):
        super().__init__()
        self.q, self.k, self.v, self.o = (LoraLinear(weights, f"{prefix}.{n}") for n in "qkvo")
        self.norm_q = RMSNorm(weights, f"{prefix}.norm_q", core.eps)
        self.norm_k = RMSNorm(weights, f"{prefix}.norm_k", core.eps)
        if with_image:
            self.k_img = LoraLinear(weights, f"{prefix}.k_img")
            self.v_img = LoraLinear(weights, f"{prefix}.v_img")
            self.norm_k_img = RMSNorm(weights, f"{prefix}.norm_k_img", core.eps)
        self.num_heads = core.num_heads
        self.attention = attention

    def forward(self, x: Tensor, text: Tensor, key_mask: Tensor | None, image: Tensor | None, masks: Masks) -> Tensor:
        q = _heads(self.norm_q(self.q(x, masks.get("q"))), self.num_heads)
        k = _heads(self.norm_k(self.k(text, masks.get("k"))), self.num_heads)
        attended = self.attention(q, k, _heads(self.v(text, masks.get("v")), self.num_heads), key_mask)
        if image is not None:
            k = _heads(self.norm_k_img(self.k_img(image, masks.get("k_img"))), self.num_heads)
            v = _heads(self.v_img(image, masks.get("v_img")), self.num_heads)
            attended = attended + self.attention(q, k, v)
        return self.o(attended, masks.get("o"))


class TextBlock(Block):
    """Self-attention, cross-attention and MLP; the first and the last are modulated by the timestep."""

    kind = "wan"

    def __init__(self, weights: FrozenWeights, prefix: str, core: Any, attention: Attention, with_image: bool = False):
        super().__init__()
        self.modulation = Modulation(weights, prefix)
        self.self_attn = SelfAttention(weights, f"{prefix}.self_attn", core.self_attn, attention)
        self.norm3 = LayerNorm(weights, f"{prefix}.norm3", core.eps)
        self.cross_attn = CrossAttention(weights, f"{prefix}.cross_attn", core.cross_attn, attention, with_image)
        self.ffn = nn.ModuleDict({n: LoraLinear(weights, f"{prefix}.ffn.{n}") for n in ("0", "2")})

    def native_name(self, name: str) -> str:
        return name

    def lora_rows(self, inputs: ModelInputs) -> dict[str, int]:
        context = {"cross_attn.k": inputs.text_tokens, "cross_attn.v": inputs.text_tokens}
        return {name: context.get(name, inputs.image_tokens) for name in self.linears()}

    def forward(self, x: Tensor, e: Tensor, pe: Tensor, text: Tensor, key_mask: Tensor | None, masks: Masks) -> Tensor:
        """Run the block. x: (B, N, D), e: (B, 1, 6, D) of the timestep, pe: (B, N, 1, head/2, 2), text: (B, L, D),
        key_mask: (B, 1, 1, L), False for its pads, or None."""
        return self._run(x, e, pe, text, key_mask, None, None, masks)

    def _run(
        self,
        x: Tensor,
        e: Tensor,
        pe: Tensor,
        text: Tensor,
        key_mask: Tensor | None,
        image: Tensor | None,
        clean: Tensor | None,
        masks: Masks,
    ) -> Tensor:
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = self.modulation(e)
        attended = self.self_attn(modulate_frames(x, shift, scale, clean), pe, masks_of("self_attn.", masks))
        x = gate_frames(x, attended, gate, clean)
        x = x + self.cross_attn(self.norm3(x), text, key_mask, image, masks_of("cross_attn.", masks))
        mlp_hidden = self.ffn["0"](modulate_frames(x, ffn_shift, ffn_scale, clean), masks.get("ffn.0"))
        mlp_hidden = self.ffn["2"](F.gelu(mlp_hidden, approximate="tanh"), masks.get("ffn.2"))
        return gate_frames(x, mlp_hidden, ffn_gate, clean)


class ImageBlock(TextBlock):
    """A block of Wan 2.1's image-to-video models."""

    kind = "wan_image"

    def __init__(self, weights: FrozenWeights, prefix: str, core: Any, attention: Attention):
        super().__init__(weights, prefix, core, attention, with_image=True)

    def lora_rows(self, inputs: ModelInputs) -> dict[str, int]:
        image = getattr(inputs, "image", None)
        assert isinstance(image, Tensor)
        image_rows = dict.fromkeys(("cross_attn.k_img", "cross_attn.v_img"), image.shape[1])
        return super().lora_rows(inputs) | image_rows

    def forward(  # type: ignore[override]
        self, x: Tensor, e: Tensor, pe: Tensor, text: Tensor, key_mask: Tensor | None, image: Tensor, masks: Masks
    ) -> Tensor:
        """Run the block as TextBlock does; image: (B, I, D)."""
        return self._run(x, e, pe, text, key_mask, image, None, masks)


class FrameBlock(TextBlock):
    """A block of Wan 2.2 5B, which has two timesteps: that of the noisy frames, and 0 for clean frames."""

    kind = "wan_frames"

    def forward(  # type: ignore[override]
        self, x: Tensor, e: Tensor, pe: Tensor, text: Tensor, key_mask: Tensor | None, clean: Tensor, masks: Masks
    ) -> Tensor:
        """Run the block as TextBlock does; e: (B, 2, 6, D), clean: (B, N, 1), true for the tokens of clean frames."""
        return self._run(x, e, pe, text, key_mask, None, clean, masks)

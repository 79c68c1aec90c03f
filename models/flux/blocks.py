"""FLUX's transformer blocks over the weights of ComfyUI's `comfy.ldm.flux.layers`.

ComfyUI's block forward adds to its inputs in place, which is wrong under autograd, and its attention wrapper causes
graph breaks; so the blocks are reimplemented here, without in-place operations, on SDPA.

B samples, N tokens of the sample's own picture, R of its references, L of its text, D hidden.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...memory.weights.frozen import FrozenWeights
from ..family import Block, ModelInputs
from ..layers.lora_linear import LoraLinear, Masks, masks_of
from ..layers.math import finite_in_fp16, gate_parts, modulate_parts
from ..layers.norm_rope import norm_rope
from .layers import QKNorm, gated_silu, gelu

Modulation = tuple[Tensor, ...]
"""shift, scale and gate, each (B, 1, D), or (B, 2, D) with a second row for the tokens from `reference_start` on."""


def _rotated(q: Sequence[Tensor], k: Sequence[Tensor], norms: Sequence[QKNorm], pe: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise, rotate and join q and k of the parts of a sequence, each (B, T, H, head)."""
    query, key = [norm.query for norm in norms], [norm.key for norm in norms]
    q_joint, k_joint = (
        norm_rope(parts, [norm.weight for norm in part_norms], pe, part_norms[0].eps)
        for parts, part_norms in ((q, query), (k, key))
    )
    return q_joint, k_joint


class FluxStream(nn.Module):
    """One half of a double block: the layers of the pictures' tokens or of the text's."""

    def __init__(
        self, weights: FrozenWeights, prefix: str, block: Any, activation: Callable[[Tensor], Tensor], modulated: bool
    ):
        """Build one side. prefix: including the side, such as double_blocks.0.img; modulated: whether it has its own
        modulation."""
        super().__init__()
        self.mod = LoraLinear(weights, f"{prefix}_mod.lin") if modulated else None
        self.qkv = LoraLinear(weights, f"{prefix}_attn.qkv")
        attention = getattr(block, f"{prefix.rpartition('.')[2]}_attn")
        self.norm = QKNorm(weights, f"{prefix}_attn.norm", attention.norm.query_norm.eps)
        self.proj = LoraLinear(weights, f"{prefix}_attn.proj")
        self.mlp_in = LoraLinear(weights, f"{prefix}_mlp.0")
        self.mlp_out = LoraLinear(weights, f"{prefix}_mlp.2")
        self.num_heads = block.num_heads
        self.activation = activation

    def modulation(self, vec: Tensor, masks: Masks) -> Tensor:
        assert self.mod is not None
        return self.mod(vec, masks.get("mod"))

    def heads(
        self, x: Tensor, modulation: Modulation, reference_start: int, masks: Masks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, T, D) to q and k before their norm, and v, each (B, T, H, head)."""
        shift, scale, _ = modulation
        qkv = self.qkv(modulate_parts(x, shift, scale, reference_start), masks.get("qkv"))
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        return q, k, v

    def after_attention(
        self, x: Tensor, attended: Tensor, first: Modulation, second: Modulation, reference_start: int, masks: Masks
    ) -> Tensor:
        x = gate_parts(x, self.proj(attended, masks.get("proj")), first[2], reference_start)
        mlp_hidden = self.mlp_in(modulate_parts(x, second[0], second[1], reference_start), masks.get("mlp_in"))
        return gate_parts(
            x, self.mlp_out(self.activation(mlp_hidden), masks.get("mlp_out")), second[2], reference_start
        )


class JointBlock(Block):
    """Pictures and text with separate weights, joined in attention.

    text_first: whether text precedes the pictures in the joint sequence; it follows for an attention that masks pads at
        the end.
    """

    kind = "double"
    text_first = True
    native = {"mod": "mod.lin", "qkv": "attn.qkv", "proj": "attn.proj", "mlp_in": "mlp.0", "mlp_out": "mlp.2"}
    activation = staticmethod(gelu)
    modulated = True

    def __init__(self, weights: FrozenWeights, prefix: str, block: Any, attention: Callable[..., Tensor]):
        super().__init__()
        self.img = FluxStream(weights, f"{prefix}.img", block, self.activation, self.modulated)
        self.txt = FluxStream(weights, f"{prefix}.txt", block, self.activation, self.modulated)
        self.attention = attention

    def native_name(self, name: str) -> str:
        side, _, layer = name.partition(".")
        return f"{side}_{self.native[layer]}"

    def lora_rows(self, inputs: ModelInputs) -> dict[str, int]:
        rows = {"img": inputs.image_tokens, "txt": inputs.text_tokens}
        return {name: 1 if name.endswith("mod") else rows[name.partition(".")[0]] for name in self.linears()}

    def run(
        self,
        img: Tensor,
        txt: Tensor,
        img_mod: Tensor,
        txt_mod: Tensor,
        pe: Tensor,
        reference_start: int,
        masks: Masks,
        attended: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run the block. img_mod: (B, 1 or 2, 6·D), txt_mod: (B, 1, 6·D), both after their Linear; attended: what the
        attention takes besides q, k and v, a key mask or bounds of the samples; the rest as in `forward`."""
        img_masks, txt_masks = masks_of("img.", masks), masks_of("txt.", masks)
        img_parts = img_mod.chunk(6, dim=-1)
        txt_parts = txt_mod.chunk(6, dim=-1)
        text = txt.shape[1]
        img_heads = self.img.heads(img, img_parts[:3], reference_start, img_masks)
        txt_heads = self.txt.heads(txt, txt_parts[:3], text, txt_masks)
        # Rotated before they are joined: a compiler then writes only the tensors that attention reads.
        qs, ks, vs = map(self.in_order, txt_heads, img_heads)
        q, k = _rotated(qs, ks, self.in_order(self.txt.norm, self.img.norm), pe)
        v = torch.cat(vs, dim=1)
        txt_attended, img_attended = self.parted(self.attention(q, k, v, attended), text)
        img = self.img.after_attention(img, img_attended, img_parts[:3], img_parts[3:], reference_start, img_masks)
        txt = self.txt.after_attention(txt, txt_attended, txt_parts[:3], txt_parts[3:], text, txt_masks)
        return img, finite_in_fp16(txt)

    def in_order(self, txt: Any, img: Any) -> tuple[Any, Any]:
        """Order a pair of text and pictures as in the joint sequence."""
        return (txt, img) if self.text_first else (img, txt)

    def parted(self, joint: Tensor, text: int) -> tuple[Tensor, Tensor]:
        """Split joint (B, L + N + R, …) into the text, of L = `text` tokens, and the pictures."""
        image_tokens = joint.shape[1] - text
        if self.text_first:
            txt, img = joint.split((text, image_tokens), dim=1)
        else:
            img, txt = joint.split((image_tokens, text), dim=1)
        return txt, img


class DoubleBlock(JointBlock):
    """FLUX.1's, with its own modulation."""

    def forward(
        self, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor, key_mask: Tensor | None, masks: Masks
    ) -> tuple[Tensor, Tensor]:
        """Run the block. img: (B, N + R, D), txt: (B, L, D), vec: (B, 1, D) after SiLU, pe: (B, L + N + R, 1, head/2,
        2), key_mask: (B, 1, 1, L + N + R), False for pads of the text, or None."""
        img_mod = self.img.modulation(vec, masks_of("img.", masks))
        txt_mod = self.txt.modulation(vec, masks_of("txt.", masks))
        return self.run(img, txt, img_mod, txt_mod, pe, img.shape[1], masks, key_mask)


class DoubleBlock2(JointBlock):
    """FLUX.2's, which takes the modulation that all double blocks share."""

    activation = staticmethod(gated_silu)
    modulated = False

    def forward(
        self,
        img: Tensor,
        txt: Tensor,
        img_mod: Tensor,
        txt_mod: Tensor,
        pe: Tensor,
        reference_start: int,
        key_mask: Tensor | None,
        masks: Masks,
    ) -> tuple[Tensor, Tensor]:
        """Run the block. img: (B, N + R, D), txt: (B, L, D), img_mod: (B, 1 or 2, 6·D), a second row is that of the
        references; txt_mod: (B, 1, 6·D), pe: (B, L + N + R, 1, head/2, 2), reference_start: N, key_mask: as
        DoubleBlock's."""
        return self.run(img, txt, img_mod, txt_mod, pe, reference_start, masks, key_mask)


class ParallelBlock(Block):
    """Attention and MLP in parallel on the joint sequence (arXiv 2302.05442)."""

    kind = "single"
    native = {"mod": "modulation.lin", "linear1": "linear1", "linear2": "linear2"}
    activation = staticmethod(gelu)
    modulated = True

    def __init__(self, weights: FrozenWeights, prefix: str, block: Any, attention: Callable[..., Tensor]):
        super().__init__()
        self.mod = LoraLinear(weights, f"{prefix}.modulation.lin") if self.modulated else None
        self.linear1 = LoraLinear(weights, f"{prefix}.linear1")
        self.linear2 = LoraLinear(weights, f"{prefix}.linear2")
        self.norm = QKNorm(weights, f"{prefix}.norm", block.norm.query_norm.eps)
        self.num_heads = block.num_heads
        self.attention = attention

    def native_name(self, name: str) -> str:
        return self.native[name]

    def lora_rows(self, inputs: ModelInputs) -> dict[str, int]:
        return {name: 1 if name == "mod" else inputs.image_tokens + inputs.text_tokens for name in self.linears()}

    def run(
        self, x: Tensor, modulation: Tensor, pe: Tensor, reference_start: int, masks: Masks, attended: Tensor | None
    ) -> Tensor:
        """Run the block. modulation: (B, 1 or 2, 3·D) after its Linear; attended: as JointBlock's; the rest as in
        `forward`."""
        shift, scale, gate = modulation.chunk(3, dim=-1)
        joint = self.linear1(modulate_parts(x, shift, scale, reference_start), masks.get("linear1"))
        # The MLP's width is cut into heads too: the gradients of one split into equal parts are written side by side,
        # each in its place.
        heads = self.num_heads
        parts = joint.unflatten(-1, (-1, x.shape[-1] // heads))
        q, k, v, mlp_hidden = parts.split((heads, heads, heads, parts.shape[2] - 3 * heads), dim=2)
        q, k = _rotated([q], [k], [self.norm], pe)
        joint = torch.cat((self.attention(q, k, v, attended), self.activation(mlp_hidden.flatten(2))), dim=-1)
        return finite_in_fp16(gate_parts(x, self.linear2(joint, masks.get("linear2")), gate, reference_start))


class SingleBlock(ParallelBlock):
    """FLUX.1's, with its own modulation."""

    def forward(self, x: Tensor, vec: Tensor, pe: Tensor, key_mask: Tensor | None, masks: Masks) -> Tensor:
        """Run the block. x: (B, L + N + R, D), vec: (B, 1, D) after SiLU, pe: (B, L + N + R, 1, head/2, 2), key_mask:
        as DoubleBlock's."""
        assert self.mod is not None
        return self.run(x, self.mod(vec, masks.get("mod")), pe, x.shape[1], masks, key_mask)


class SingleBlock2(ParallelBlock):
    """FLUX.2's, which takes the modulation that all single blocks share."""

    activation = staticmethod(gated_silu)
    modulated = False

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        pe: Tensor,
        reference_start: int,
        key_mask: Tensor | None,
        masks: Masks,
    ) -> Tensor:
        """Run the block. x: (B, L + N + R, D), modulation: (B, 1 or 2, 3·D), a second row is that of the references;
        pe: (B, L + N + R, 1, head/2, 2), reference_start: L + N, key_mask: as DoubleBlock's."""
        return self.run(x, modulation, pe, reference_start, masks, key_mask)

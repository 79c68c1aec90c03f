"""FLUX.1: the transformer of black-forest-labs/flux over the weights of ComfyUI's `comfy.ldm.flux.model.Flux`.

ComfyUI's block forward adds to its inputs in place, which is wrong under autograd, and its attention wrapper does not
trace whole; so the blocks are written here again, without in-place operations, on SDPA.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_base
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn
from torch.nn import functional as F

from ..memory.frozen import FrozenWeights
from ..memory.residency import FrozenModule
from .attention import Attention, attention_function
from .conditioning import model_conditioning
from .family import Block, ModelInputs, NoisySample, Origin, Patches, RunBlock, SampleFacts
from .latents import FLUX, LatentPolicy
from .lora_linear import LoraLinear
from .math import finite_in_fp16, modulate, rope, rotate, timestep_embedding

SCHNELL_TEXT_LENGTH = 256
Modulation = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class FluxInputs(ModelInputs):
    """positions: (B, N, 3) ids of the kept tokens; pooled: (B, P) or None; guidance: (B,) or None."""

    positions: Tensor
    pooled: Tensor | None
    guidance: Tensor | None


class QKNorm(FrozenModule):
    """RMS norm of queries and keys over the head dimension."""

    query_scale: Tensor | None
    key_scale: Tensor | None

    def __init__(self, weights: FrozenWeights, name: str, eps: float | None):
        super().__init__()
        self._source = (weights, name)
        self.take()
        self.eps = eps

    def take(self) -> None:
        weights, name = self._source
        self.register_buffer("query_scale", weights.tensor(f"{name}.query_norm.weight"), persistent=False)
        self.register_buffer("key_scale", weights.tensor(f"{name}.key_norm.weight"), persistent=False)

    def moved(self, name: str, source: Tensor, moved: Tensor) -> None:
        weights, own = self._source
        weights.moved(f"{own}.{name.removesuffix('_scale')}_norm.weight", source, moved)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        head = q.shape[-1:]
        return F.rms_norm(q, head, self.query_scale, self.eps), F.rms_norm(k, head, self.key_scale, self.eps)


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


class Embedder(nn.Module):
    """Two Linears with SiLU between, for time, guidance and the pooled text."""

    def __init__(self, weights: FrozenWeights, name: str):
        super().__init__()
        self.in_layer = LoraLinear(weights, f"{name}.in_layer")
        self.out_layer = LoraLinear(weights, f"{name}.out_layer")

    def forward(self, x: Tensor) -> Tensor:
        return self.out_layer(F.silu(self.in_layer(x)))


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


def _pooled(conds: Sequence[dict[str, Tensor]]) -> Tensor | None:
    """(B, P); a sample without pooled text has zeros, as core gives it."""
    known = [c["y"] for c in conds if "y" in c]
    return torch.cat([c.get("y", torch.zeros_like(known[0])) for c in conds]) if known else None


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

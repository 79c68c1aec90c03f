"""A stand-in for ComfyUI's Qwen Image 2.1, which is newer than the ComfyUI of the tests.

Ours, after the interface that its stored sources show (comfy/ldm/qwen_image21/model.py, since 0.37): a BaseModel under
that of Qwen-Image, one modulation for all blocks, a closure as argument of each block, slices written in place at
another offset, a cache of values that do not change from step to step, marks for the recorder of allocations, and an
MLP whose two halves are one weight in fused files and two in split ones.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import comfy.conds
import comfy.latent_formats
import comfy.lora
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.model_prefetch
import comfy.supported_models
import comfy.supported_models_base
import torch
from comfy.ldm.flux.layers import EmbedND, timestep_embedding
from comfy.ldm.flux.math import apply_rope1
from comfy.ldm.modules.attention import optimized_attention
from torch import Tensor, nn

CHANNELS = 64
TEXT = 48
HEADS = 2
HEAD = 32
LAYERS = 3
WIDTH, HIDDEN = HEADS * HEAD, 3 * HEADS * HEAD


def _mark(name: str, *arguments: Any) -> None:
    """Call the recorder of allocations, if this ComfyUI has one."""
    getattr(comfy.model_prefetch, name, lambda *_: None)(*arguments)


class Attention(nn.Module):
    def __init__(self, operations: Any):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (operations.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([operations.Linear(WIDTH, WIDTH, bias=False)])
        self.norm_q, self.norm_k = (operations.RMSNorm(HEAD, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor, pe: Tensor, attend: Any) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (HEADS, HEAD)) for linear in (self.to_q, self.to_k, self.to_v))
        q, k = apply_rope1(self.norm_q(q), pe), apply_rope1(self.norm_k(k), pe)
        return self.to_out[0](attend(q, k, v))


class FeedForward(nn.Module):
    def __init__(self, fused: bool, operations: Any):
        super().__init__()
        self.fused = fused
        if fused:
            self.gate_up = operations.Linear(WIDTH, 2 * HIDDEN, bias=False)
        else:
            self.proj, self.gate_layer = (operations.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.out = operations.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1) if self.fused else (self.gate_layer(x), self.proj(x))
        return self.out(nn.functional.silu(gate) * up)


class QwenImage21TransformerBlock(nn.Module):
    def __init__(self, fused: bool, operations: Any):
        super().__init__()
        self.img_norm1, self.img_norm2 = (operations.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.attn, self.img_mlp = Attention(operations), FeedForward(fused, operations)

    def forward(
        self, x: Tensor, mod: Any, pe: Tensor, attend: Any, prefix: int, transformer_options: dict[str, Any]
    ) -> Tensor:
        scale1, gate1, scale2, gate2 = mod
        x = _add(x, self.attn(_scaled(self.img_norm1(x), scale1, prefix), pe, attend), gate1, prefix)
        return _add(x, self.img_mlp(_scaled(self.img_norm2(x), scale2, prefix)), gate2, prefix)


def _scaled(x: Tensor, scales: tuple[Tensor, Tensor], prefix: int) -> Tensor:
    text_scale, picture_scale = scales
    if comfy.model_management.in_training:
        return torch.cat((x[:, :prefix] * (1 + text_scale), x[:, prefix:] * (1 + picture_scale)), dim=1)
    out = x * (1 + picture_scale)
    out[:, :prefix] = x[:, :prefix] * (1 + text_scale)
    return out


def _add(x: Tensor, y: Tensor, gates: tuple[Tensor, Tensor], prefix: int) -> Tensor:
    text_gate, picture_gate = gates
    x[:, prefix:].addcmul_(y[:, prefix:], picture_gate)
    if prefix:
        x[:, :prefix].addcmul_(y[:, :prefix], text_gate)
    return x


def _causal(prefix: int, options: dict[str, Any]) -> Any:
    """Text sees the text before it, the picture everything."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(prefix, prefix, dtype=torch.bool, device=q.device).tril()
        text = [tensor[:, :prefix].flatten(2) for tensor in (q, k, v)]
        outs = (
            optimized_attention(*text, HEADS, mask=mask, transformer_options=options),
            optimized_attention(
                q[:, prefix:].flatten(2), k.flatten(2), v.flatten(2), HEADS, transformer_options=options
            ),
        )
        return torch.cat(outs, dim=1)

    return attend


class QwenImage21Transformer2DModel(nn.Module):
    def __init__(self, image_model: str, fused: bool, dtype: Any = None, device: Any = None, operations: Any = None):
        super().__init__()
        self.dtype = dtype
        self.pe_embedder = EmbedND(dim=HEAD, theta=10000, axes_dim=[8, 12, 12])
        self.time_text_embed = operations.Linear(256, WIDTH)
        self.txt_in = operations.Linear(TEXT, WIDTH, bias=False)
        self.img_in = operations.Linear(CHANNELS, WIDTH, bias=False)
        self.modulation = nn.Sequential(nn.SiLU(), operations.Linear(WIDTH, 4 * WIDTH, bias=False))
        self.transformer_blocks = nn.ModuleList(QwenImage21TransformerBlock(fused, operations) for _ in range(LAYERS))
        self.norm_out = operations.LayerNorm(WIDTH, elementwise_affine=False)
        self.proj_out = operations.Linear(WIDTH, CHANNELS, bias=False)
        self.prefix_cache: Any = None
        self.prefix_cache_enabled = False

    def forward(
        self, x: Tensor, timestep: Tensor, context: Tensor, transformer_options: dict[str, Any], **kwargs: Any
    ) -> Tensor:
        height, width = x.shape[-2:]
        text, picture = self.txt_in(context), self.img_in(x.flatten(2).transpose(1, 2))
        if self.prefix_cache_enabled:  # of a run of the sampler; training must never meet one
            self.prefix_cache = text if self.prefix_cache is None else self.prefix_cache
            text = self.prefix_cache
        prefix, tokens = text.shape[1], torch.cat((text, picture), dim=1)
        text_ids = torch.arange(prefix, dtype=torch.float32)[:, None].expand(prefix, 3)
        rows, columns = torch.meshgrid(
            torch.arange(height) - height / 2, torch.arange(width) - width / 2, indexing="ij"
        )
        grid = torch.stack((torch.full_like(rows, float(prefix)), rows, columns), dim=-1).flatten(0, 1)
        pe = self.pe_embedder(torch.cat((text_ids, grid))[None].to(x.device)).transpose(1, 2).contiguous()
        levels = torch.cat((timestep, timestep.new_zeros(1)))
        temb = self.time_text_embed(timestep_embedding(levels, 256).to(x.dtype))
        scale1, gate1, scale2, gate2 = self.modulation(temb).chunk(4, dim=-1)
        mod = tuple((m[-1:, None], m[:-1, None]) for m in (scale1, gate1.tanh(), scale2, gate2.tanh()))
        transformer_options["total_blocks"] = len(self.transformer_blocks)
        _mark("malloc_graph_begin", x.device)
        for index, block in enumerate(self.transformer_blocks):
            transformer_options["block_index"] = index
            tokens = block(tokens, mod, pe, _causal(prefix, transformer_options), prefix, transformer_options)
        _mark("malloc_graph_end")
        return self.proj_out(self.norm_out(tokens[:, prefix:])).transpose(1, 2).unflatten(2, (height, width))


class QwenImage21(comfy.model_base.QwenImage):
    def __init__(self, config: Any, device: Any = None):
        comfy.model_base.BaseModel.__init__(
            self, config, comfy.model_base.ModelType.FLUX, device=device, unet_model=QwenImage21Transformer2DModel
        )

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        conds = comfy.model_base.BaseModel.extra_conds(self, **kwargs)
        return conds | {"c_crossattn": comfy.conds.CONDRegular(kwargs["cross_attn"])}


# ComfyUI's modules of these classes.
QwenImage21.__module__ = "comfy.model_base"
QwenImage21Transformer2DModel.__module__ = "comfy.ldm.qwen_image21.model"


class _Latents(comfy.latent_formats.LatentFormat):
    latent_channels, latent_dimensions = CHANNELS, 2
    spacial_downscale_ratio = 16


class Config(comfy.supported_models_base.BASE):
    unet_config = {"image_model": "qwen_image_2.1"}
    unet_extra_config = {}
    sampling_settings = {"multiplier": 1.0, "shift": 1.15}
    latent_format = _Latents

    def get_model(self, state_dict: Any, prefix: str = "", device: Any = None) -> QwenImage21:
        return QwenImage21(self, device=device)


Config.__name__ = "QwenImage21"


def load(fused: bool = True) -> Any:
    """A MODEL as a loader makes it, with one set of weights for both kinds of file."""
    with torch.inference_mode():
        config = Config({"image_model": "qwen_image_2.1"})
        config.unet_config |= {"fused": fused}
        config.set_inference_dtype(torch.float32, None)
        model = config.get_model({}, device=torch.device("cpu"))
        source = torch.Generator().manual_seed(0)
        whole = {name: torch.randn(p.shape, generator=source) for name, p in _shapes().items()}
        for name, parameter in model.diffusion_model.named_parameters():
            value = _half(name, whole) if ".proj." in name or "gate_layer" in name else whole[name]
            parameter.copy_(value / value.shape[-1] ** 0.5 if value.ndim > 1 else 1 + 0.1 * value)
    cpu = torch.device("cpu")
    patcher = comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)
    patcher.cached_patcher_init = (load, (fused,))
    return patcher


def _shapes() -> dict[str, Tensor]:
    with torch.device("meta"):
        return dict(QwenImage21Transformer2DModel("", True, operations=_Plain).named_parameters())


class _Plain:
    Linear = nn.Linear
    LayerNorm = nn.LayerNorm
    RMSNorm = nn.RMSNorm


def _half(name: str, whole: dict[str, Tensor]) -> Tensor:
    gate, up = whole[name.replace("gate_layer", "gate_up").replace(".proj.", ".gate_up.")].chunk(2)
    return gate if "gate_layer" in name else up


@contextmanager
def newer_comfyui() -> Iterator[None]:
    """ComfyUI with the class, and with its names of LoRA keys: those of each half, for a fused model."""
    original = comfy.lora.model_lora_keys_unet

    def keys(model: Any, key_map: dict[str, Any]) -> dict[str, Any]:
        key_map = original(model, key_map)
        for key, weight in model.state_dict().items() if isinstance(model, QwenImage21) else ():
            name = key.removeprefix("diffusion_model.").removesuffix(".weight")
            if not name.endswith(".img_mlp.gate_up"):
                continue
            half = weight.shape[0] // 2
            for part, start in (("gate_layer", 0), ("proj", half)):
                alias = name.replace("gate_up", part)
                places = dict.fromkeys((alias, f"transformer.{alias}"), (key, (0, start, half)))
                key_map = {k: v for k, v in key_map.items() if k not in (name, f"transformer.{name}")} | places
        return key_map

    with ExitStack() as stack:
        stack.enter_context(patch.object(comfy.model_base, "QwenImage21", QwenImage21, create=True))
        models = [*comfy.supported_models.models, Config]
        stack.enter_context(patch.object(comfy.supported_models, "models", models))
        stack.enter_context(patch.object(comfy.lora, "model_lora_keys_unet", keys))
        yield

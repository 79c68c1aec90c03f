"""Qwen-Image's modules, whose names ComfyUI and diffusers share (diffusers, transformer_qwenimage.py)."""

from ..name_table import NameTable

_OUTER = (
    "img_in",
    "txt_in",
    "time_text_embed.timestep_embedder.linear_1",
    "time_text_embed.timestep_embedder.linear_2",
    "norm_out.linear",
    "proj_out",
)
_OF_BLOCKS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "img_mod.1",
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mod.1",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
)
_NORMS = ("attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k")
_NAMES = _OUTER + tuple(f"transformer_blocks.{{}}.{name}" for name in _OF_BLOCKS)

QWEN_IMAGE_NAMES = NameTable(
    {name: (name,) for name in _NAMES},
    ("txt_norm", *(f"transformer_blocks.{{}}.{name}" for name in _NORMS)),
)

"""Wan's modules: natively (Wan-Video, ComfyUI) and in diffusers."""

from ..name_table import Gap, NameTable

# The layout is that of diffusers' scripts/convert_wan_to_diffusers.py.
_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
_EMBEDDER = "condition_embedder"

_TO_DIFFUSERS: dict[str, tuple[str, ...]] = {
    "text_embedding.0": (f"{_EMBEDDER}.text_embedder.linear_1",),
    "text_embedding.2": (f"{_EMBEDDER}.text_embedder.linear_2",),
    "time_embedding.0": (f"{_EMBEDDER}.time_embedder.linear_1",),
    "time_embedding.2": (f"{_EMBEDDER}.time_embedder.linear_2",),
    "time_projection.1": (f"{_EMBEDDER}.time_proj",),
    "img_emb.proj.1": (f"{_EMBEDDER}.image_embedder.ff.net.0.proj",),
    "img_emb.proj.3": (f"{_EMBEDDER}.image_embedder.ff.net.2",),
    **{f"blocks.{{}}.self_attn.{name}": (f"blocks.{{}}.attn1.{target}",) for name, target in _ATTENTION.items()},
    **{f"blocks.{{}}.cross_attn.{name}": (f"blocks.{{}}.attn2.{target}",) for name, target in _ATTENTION.items()},
    "blocks.{}.cross_attn.k_img": ("blocks.{}.attn2.add_k_proj",),
    "blocks.{}.cross_attn.v_img": ("blocks.{}.attn2.add_v_proj",),
    "blocks.{}.ffn.0": ("blocks.{}.ffn.net.0.proj",),
    "blocks.{}.ffn.2": ("blocks.{}.ffn.net.2",),
    "head.head": ("proj_out",),
}

# Modules without a weight matrix: other trainers store weight differences of them, or LoRAs of the convolution.
_OTHERS = (
    "patch_embedding",
    "img_emb.proj.0",
    "img_emb.proj.4",
    "blocks.{}.norm3",
    "blocks.{}.self_attn.norm_q",
    "blocks.{}.self_attn.norm_k",
    "blocks.{}.cross_attn.norm_q",
    "blocks.{}.cross_attn.norm_k",
    "blocks.{}.cross_attn.norm_k_img",
)

# ComfyUI has no table of diffusers' names for Wan. diffusers' converter of kohya's names supports blocks only, and
# fails on any other.
_GAPS = (
    Gap("ComfyUI", "diffusers", ("*",)),
    Gap("diffusers", "kohya", ("*_embedding*", "time_projection.*", "img_emb.*", "head.*"), refuses=True),
)
WAN_NAMES = NameTable(_TO_DIFFUSERS, _OTHERS, gaps=_GAPS)

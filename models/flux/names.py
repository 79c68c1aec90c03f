"""The modules of FLUX.1 and FLUX.2: natively (Black Forest Labs, ComfyUI) and in diffusers."""

from ..name_table import Gap, NameTable

# The attention of double blocks has the same names in FLUX.1 and FLUX.2.
_ATTENTION: dict[str, tuple[str, ...]] = {
    "double_blocks.{}.img_attn.qkv": (
        "transformer_blocks.{}.attn.to_q",
        "transformer_blocks.{}.attn.to_k",
        "transformer_blocks.{}.attn.to_v",
    ),
    "double_blocks.{}.txt_attn.qkv": (
        "transformer_blocks.{}.attn.add_q_proj",
        "transformer_blocks.{}.attn.add_k_proj",
        "transformer_blocks.{}.attn.add_v_proj",
    ),
    "double_blocks.{}.img_attn.proj": ("transformer_blocks.{}.attn.to_out.0",),
    "double_blocks.{}.txt_attn.proj": ("transformer_blocks.{}.attn.to_add_out",),
}

# The layout is that of diffusers' scripts/convert_flux_to_diffusers.py.
_FLUX1: dict[str, tuple[str, ...]] = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    "double_blocks.{}.img_mod.lin": ("transformer_blocks.{}.norm1.linear",),
    "double_blocks.{}.txt_mod.lin": ("transformer_blocks.{}.norm1_context.linear",),
    **_ATTENTION,
    "double_blocks.{}.img_mlp.0": ("transformer_blocks.{}.ff.net.0.proj",),
    "double_blocks.{}.img_mlp.2": ("transformer_blocks.{}.ff.net.2",),
    "double_blocks.{}.txt_mlp.0": ("transformer_blocks.{}.ff_context.net.0.proj",),
    "double_blocks.{}.txt_mlp.2": ("transformer_blocks.{}.ff_context.net.2",),
    "single_blocks.{}.linear1": (
        "single_transformer_blocks.{}.attn.to_q",
        "single_transformer_blocks.{}.attn.to_k",
        "single_transformer_blocks.{}.attn.to_v",
        "single_transformer_blocks.{}.proj_mlp",
    ),
    "single_blocks.{}.linear2": ("single_transformer_blocks.{}.proj_out",),
    "single_blocks.{}.modulation.lin": ("single_transformer_blocks.{}.norm.linear",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}

# Modules without a matrix: other trainers store differences of their weights.
_NORMS = (
    "double_blocks.{}.img_attn.norm.query_norm",
    "double_blocks.{}.img_attn.norm.key_norm",
    "double_blocks.{}.txt_attn.norm.query_norm",
    "double_blocks.{}.txt_attn.norm.key_norm",
    "single_blocks.{}.norm.query_norm",
    "single_blocks.{}.norm.key_norm",
)


# The native modulation of the last layer gives (shift, scale), diffusers' gives (scale, shift).
_HALVES_SWAPPED = frozenset({"final_layer.adaLN_modulation.1"})
_FLUX1_PROPORTIONS = {
    "double_blocks.{}.img_mlp.0": (4, 1),
    "double_blocks.{}.img_mlp.2": (1, 4),
    "double_blocks.{}.txt_mlp.0": (4, 1),
    "double_blocks.{}.txt_mlp.2": (1, 4),
    "single_blocks.{}.linear1": (3 + 4, 1),
    "single_blocks.{}.linear2": (1, 1 + 4),
}
# diffusers expects its own names after ComfyUI's prefix.
FLUX1_GAPS = (Gap("diffusers", "comfyui", ("*",)),)
FLUX1_NAMES = NameTable(_FLUX1, _NORMS, halves_swapped=_HALVES_SWAPPED, proportions=_FLUX1_PROPORTIONS, gaps=FLUX1_GAPS)

_FLUX2_EMBEDDER = "time_guidance_embed"

# The layout is that of diffusers' loaders/single_file_utils.py, convert_flux2_transformer_checkpoint_to_diffusers.
_FLUX2: dict[str, tuple[str, ...]] = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": (f"{_FLUX2_EMBEDDER}.timestep_embedder.linear_1",),
    "time_in.out_layer": (f"{_FLUX2_EMBEDDER}.timestep_embedder.linear_2",),
    "guidance_in.in_layer": (f"{_FLUX2_EMBEDDER}.guidance_embedder.linear_1",),
    "guidance_in.out_layer": (f"{_FLUX2_EMBEDDER}.guidance_embedder.linear_2",),
    "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
    "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
    "single_stream_modulation.lin": ("single_stream_modulation.linear",),
    **_ATTENTION,
    "double_blocks.{}.img_mlp.0": ("transformer_blocks.{}.ff.linear_in",),
    "double_blocks.{}.img_mlp.2": ("transformer_blocks.{}.ff.linear_out",),
    "double_blocks.{}.txt_mlp.0": ("transformer_blocks.{}.ff_context.linear_in",),
    "double_blocks.{}.txt_mlp.2": ("transformer_blocks.{}.ff_context.linear_out",),
    "single_blocks.{}.linear1": ("single_transformer_blocks.{}.attn.to_qkv_mlp_proj",),
    "single_blocks.{}.linear2": ("single_transformer_blocks.{}.attn.to_out",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}

# The MLP is three times as wide as the model, and gated.
_FLUX2_PROPORTIONS = {
    "double_blocks.{}.img_mlp.0": (6, 1),
    "double_blocks.{}.img_mlp.2": (1, 3),
    "double_blocks.{}.txt_mlp.0": (6, 1),
    "double_blocks.{}.txt_mlp.2": (1, 3),
    "single_blocks.{}.linear1": (3 + 6, 1),
    "single_blocks.{}.linear2": (1, 1 + 3),
}
# ComfyUI's table of diffusers' names uses FLUX.1's for embedders and modulation. diffusers' converter of kohya's names
# lacks some, and its converter of ComfyUI's names reads the last modulation's (shift, scale) as (scale, shift).
_FLUX2_GAPS = (
    Gap("ComfyUI", "diffusers", ("time_in.*", "guidance_in.*", "*_stream_modulation*")),
    Gap("diffusers", "kohya", ("guidance_in.*", "*_stream_modulation*", "final_layer.adaLN_modulation.1")),
    Gap("diffusers", "comfyui", ("final_layer.adaLN_modulation.1",)),
)
FLUX2_NAMES = NameTable(
    _FLUX2, _NORMS, halves_swapped=_HALVES_SWAPPED, proportions=_FLUX2_PROPORTIONS, gaps=_FLUX2_GAPS
)

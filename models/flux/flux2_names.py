"""FLUX.2's modules: natively (Black Forest Labs, ComfyUI) and in diffusers."""

from ..name_table import NameTable
from .names import ATTENTION, HALVES_SWAPPED, NORMS

_EMBEDDER = "time_guidance_embed"

# The layout is that of diffusers' loaders/single_file_utils.py, convert_flux2_transformer_checkpoint_to_diffusers.
TO_DIFFUSERS: dict[str, tuple[str, ...]] = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": (f"{_EMBEDDER}.timestep_embedder.linear_1",),
    "time_in.out_layer": (f"{_EMBEDDER}.timestep_embedder.linear_2",),
    "guidance_in.in_layer": (f"{_EMBEDDER}.guidance_embedder.linear_1",),
    "guidance_in.out_layer": (f"{_EMBEDDER}.guidance_embedder.linear_2",),
    "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
    "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
    "single_stream_modulation.lin": ("single_stream_modulation.linear",),
    **ATTENTION,
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
PROPORTIONS = {
    "double_blocks.{}.img_mlp.0": (6, 1),
    "double_blocks.{}.img_mlp.2": (1, 3),
    "double_blocks.{}.txt_mlp.0": (6, 1),
    "double_blocks.{}.txt_mlp.2": (1, 3),
    "single_blocks.{}.linear1": (3 + 6, 1),
    "single_blocks.{}.linear2": (1, 1 + 3),
}
FLUX2 = NameTable("flux2", TO_DIFFUSERS, NORMS, halves_swapped=HALVES_SWAPPED, proportions=PROPORTIONS)

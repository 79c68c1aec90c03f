"""How FLUX.1's modules are called: natively (Black Forest Labs, ComfyUI), in kohya's flat keys, and in diffusers.

Kohya's keys write the dots of a module name as underscores, so that only a table of the model's names can undo it.
"""

import re

# Native module name -> the diffusers modules that together hold it, in the order of its output rows.
# "{}" is the number of the block. The layout is that of diffusers' scripts/convert_flux_to_diffusers.py.
FLUX_TO_DIFFUSERS: dict[str, tuple[str, ...]] = {
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
SHIFT_SCALE_SWAPPED = "final_layer.adaLN_modulation.1"

_FLAT = {template.replace(".", "_").format(r"(\d+)"): template for template in (*FLUX_TO_DIFFUSERS, *_NORMS)}


def flat_name(name: str) -> str:
    """`double_blocks.0.img_attn.qkv` as kohya's keys write it: `double_blocks_0_img_attn_qkv`."""
    return name.replace(".", "_")


def flux_name(flat: str) -> str | None:
    """The native name of a FLUX module from its flat one; None where FLUX has no such module."""
    for pattern, template in _FLAT.items():
        if match := re.fullmatch(pattern, flat):
            return template.format(*match.groups())
    return None


def diffusers_names(name: str) -> tuple[str, ...]:
    """The diffusers modules that hold the native FLUX module `name`, in row order; empty where there is none."""
    index = re.search(r"\.(\d+)\.", name) if name.startswith(("double_blocks.", "single_blocks.")) else None
    template = name.replace(index.group(), ".{}.", 1) if index else name
    return tuple(part.format(index.group(1) if index else "") for part in FLUX_TO_DIFFUSERS.get(template, ()))


def diffusers_rows(name: str, rows: int, columns: int) -> list[int]:
    """How many of the native module's output rows each of its diffusers modules takes.

    rows, columns: the native weight's (out, in). The single blocks' `linear1` is q, k and v of the hidden size
    (its own input size) and then the MLP; the double blocks' `qkv` is three equal parts.
    """
    parts = len(diffusers_names(name))
    if parts == 4:
        return [columns] * 3 + [rows - 3 * columns]
    return [rows // parts] * parts

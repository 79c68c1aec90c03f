"""HunyuanVideo's and HunyuanVideo 1.5's modules in diffusers.

The layout is that of diffusers' scripts, convert_hunyuan_video_to_diffusers.py and its namesake for version 1.5.
"""

from collections.abc import Iterable, Iterator

from ..name_table import filled, matcher

_EMBEDDER = {"in_layer": "linear_1", "out_layer": "linear_2"}
_TEXT = "context_embedder"
_REFINER = "txt_in.individual_token_refiner.blocks.{}"
_REFINER_THERE = f"{_TEXT}.token_refiner.refiner_blocks.{{}}"

_TEMPLATES: dict[str, tuple[str, ...]] = {
    **{f"vector_in.{a}": (f"time_text_embed.text_embedder.{b}",) for a, b in _EMBEDDER.items()},
    **{f"guidance_in.{a}": (f"time_text_embed.guidance_embedder.{b}",) for a, b in _EMBEDDER.items()},
    "txt_in.input_embedder": (f"{_TEXT}.proj_in",),
    **{f"txt_in.t_embedder.{a}": (f"{_TEXT}.time_text_embed.timestep_embedder.{b}",) for a, b in _EMBEDDER.items()},
    **{f"txt_in.c_embedder.{a}": (f"{_TEXT}.time_text_embed.text_embedder.{b}",) for a, b in _EMBEDDER.items()},
    f"{_REFINER}.self_attn.qkv": tuple(f"{_REFINER_THERE}.attn.to_{part}" for part in "qkv"),
    f"{_REFINER}.self_attn.proj": (f"{_REFINER_THERE}.attn.to_out.0",),
    f"{_REFINER}.mlp.0": (f"{_REFINER_THERE}.ff.net.0.proj",),
    f"{_REFINER}.mlp.2": (f"{_REFINER_THERE}.ff.net.2",),
    f"{_REFINER}.adaLN_modulation.1": (f"{_REFINER_THERE}.norm_out.linear",),
    "double_blocks.{}.img_mod.lin": ("transformer_blocks.{}.norm1.linear",),
    "double_blocks.{}.txt_mod.lin": ("transformer_blocks.{}.norm1_context.linear",),
    "double_blocks.{}.img_attn.qkv": tuple(f"transformer_blocks.{{}}.attn.to_{part}" for part in "qkv"),
    "double_blocks.{}.txt_attn.qkv": tuple(f"transformer_blocks.{{}}.attn.add_{part}_proj" for part in "qkv"),
    "double_blocks.{}.img_attn.proj": ("transformer_blocks.{}.attn.to_out.0",),
    "double_blocks.{}.txt_attn.proj": ("transformer_blocks.{}.attn.to_add_out",),
    "double_blocks.{}.img_mlp.0": ("transformer_blocks.{}.ff.net.0.proj",),
    "double_blocks.{}.img_mlp.2": ("transformer_blocks.{}.ff.net.2",),
    "double_blocks.{}.txt_mlp.0": ("transformer_blocks.{}.ff_context.net.0.proj",),
    "double_blocks.{}.txt_mlp.2": ("transformer_blocks.{}.ff_context.net.2",),
    "single_blocks.{}.linear1": (
        *(f"single_transformer_blocks.{{}}.attn.to_{part}" for part in "qkv"),
        "single_transformer_blocks.{}.proj_mlp",
    ),
    "single_blocks.{}.linear2": ("single_transformer_blocks.{}.proj_out",),
    "single_blocks.{}.modulation.lin": ("single_transformer_blocks.{}.norm.linear",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    # HunyuanVideo 1.5: the glyph encoder and the picture that a clip begins with.
    **{f"byt5_in.fc{n}": (f"{_TEXT}_2.linear_{n}",) for n in (1, 2, 3)},
    "vision_in.proj.1": ("image_embedder.linear_1",),
    "vision_in.proj.3": ("image_embedder.linear_2",),
}
# diffusers' last modulation is (scale, shift), ComfyUI's (shift, scale).
HALVES_SWAPPED = frozenset({"final_layer.adaLN_modulation.1"})


def diffusers_parts(names: Iterable[str], is_version_1_5: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each of a model's modules that diffusers has, with its modules there in row order."""
    owner = "time_embed" if is_version_1_5 else "time_text_embed"
    templates = {f"time_in.{a}": (f"{owner}.timestep_embedder.{b}",) for a, b in _EMBEDDER.items()} | _TEMPLATES
    patterns = {matcher(template): parts for template, parts in templates.items()}
    for name in names:
        for pattern, parts in patterns.items():
            if match := pattern.fullmatch(name):
                yield name, tuple(filled(part, match.groups()) for part in parts)

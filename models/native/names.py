"""The name table of a model derived from its modules alone: ComfyUI's and kohya's names follow from them.

diffusers' names are those that ComfyUI maps to its own (`comfy.lora.model_lora_keys_unet`), inverted; the models that
this is correct for are listed here and tested with diffusers' own classes.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import comfy.lora
import comfy.model_base
import comfy.supported_models
import comfy.utils

from ..blocks import linear_shapes
from ..family import Origin
from ..name_table import Gap, NameTable, filled, flat_name
from . import hunyuan_video_names

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_TRANSFORMERS = (
    comfy.model_base.SD3,
    comfy.model_base.AuraFlow,
    comfy.model_base.PixArt,
    comfy.model_base.Krea2,
)
# Fused in ComfyUI's files, and two layers in diffusers' and in split ones, in row order. In a fused model ComfyUI has a
# name for each half, in a split one none for the whole (comfy/lora.py, model_lora_keys_unet, QwenImage).
_QWEN_IMAGE_2_1 = (".img_mlp.gate_up", (".img_mlp.gate_layer", ".img_mlp.proj"))
# ComfyUI has no table of diffusers' names for it.
_HUNYUAN_VIDEO_GAPS = (Gap("ComfyUI", "diffusers", ("*",)),)
_Parts = Mapping[str, tuple[str, ...]]
_STABILITY = "https://github.com/Stability-AI/generative-models"
_COMFYUI = "https://github.com/comfyanonymous/ComfyUI"


def names_of(module_names: Iterable[str]) -> NameTable:
    """Make the table of a model from the names of its modules, such as `layers.0.attention.qkv`, without diffusers'
    names.

    Raises ValueError if two modules have one name in kohya's keys, which ComfyUI could not distinguish either.
    """
    return _table(tuple(dict.fromkeys(module_names)))


def native_names(model: Any) -> NameTable:
    """Make the table of a ComfyUI BaseModel, from all modules of its diffusion model that have a weight.

    kohya's scripts train Stable Diffusion 1 and 2 on diffusers' U-Net, and SDXL on Stability's own, whose names ComfyUI
    uses (kohya-ss/sd-scripts, networks/lora.py).
    """
    modules = model.diffusion_model.named_modules()
    names = tuple(name for name, module in modules if hasattr(module, "weight"))
    kind, config = type(model), model.model_config.unet_config
    if kind in (comfy.model_base.BaseModel, comfy.model_base.SDXL) and "num_res_blocks" in config:
        # ComfyUI maps two diffusers names to the embedding of SDXL's sizes; the other is for class-conditional models.
        aliases = _without_weight(comfy.utils.unet_to_diffusers(config)).items()
        diffusers_names = {
            core_name: (diffusers_name,)
            for diffusers_name, core_name in aliases
            if not diffusers_name.startswith("class_embedding.")
        }
        name_parts = tuple((name, diffusers_names[name]) for name in names if name in diffusers_names)
        return _table(names, name_parts, unet=True, kohya_by_diffusers=kind is comfy.model_base.BaseModel)
    if kind is getattr(comfy.model_base, "QwenImage21", None):
        fused, halves = _QWEN_IMAGE_2_1
        name_parts = tuple(
            (name, tuple(name.removesuffix(fused) + half for half in halves) if name.endswith(fused) else (name,))
            for name in names
        )
        return _table(names, name_parts, cut=frozenset(name for name in names if name.endswith(fused)))
    if isinstance(model, comfy.model_base.HunyuanVideo):
        is_newer = isinstance(model, getattr(comfy.model_base, "HunyuanVideo15", ()))
        hunyuan_parts = dict(hunyuan_video_names.diffusers_parts(names, is_newer))
        swapped = frozenset(hunyuan_video_names.HALVES_SWAPPED & hunyuan_parts.keys())
        return _table(names, tuple(hunyuan_parts.items()), swapped, gaps=_HUNYUAN_VIDEO_GAPS)
    if kind in _TRANSFORMERS or (kind is comfy.model_base.Lumina2 and config.get("z_image_modulation")):
        rows = dict.fromkeys(names, 0) | {name: rows for name, (rows, _) in linear_shapes(model).items()}
        parts, swapped = _turned_round(comfy.lora.model_lora_keys_unet(model, {}), rows)
        return _table(names, tuple(parts.items()), swapped)
    return _table(names)


def origin_of(model: Any, name: str) -> Origin:
    """Name a ComfyUI BaseModel for the metadata of its LoRAs, like kohya's scripts for the models that they train
    (kohya-ss/sd-scripts, library/sai_model_spec.py, and get_model_version_str_for_sd1_sd2 of library/train_util.py),
    which programs sort LoRAs by; any other is called `name`, with ComfyUI's layer names."""
    kind, config = type(model), model.model_config.unet_config
    if kind is comfy.model_base.SDXL:
        return Origin("stable-diffusion-xl-v1-base", _STABILITY, "sdxl_base_v1-0", "networks.lora")
    if kind is comfy.model_base.BaseModel and "num_res_blocks" in config:
        velocity = model.model_type is comfy.model_base.ModelType.V_PREDICTION
        if not isinstance(model.model_config, comfy.supported_models.SD20):
            return Origin("stable-diffusion-v1", "diffusers", "sd_v1_v" if velocity else "sd_v1", "networks.lora")
        size = "768-v" if velocity else "512"
        version = "sd_v2_v" if velocity else "sd_v2"
        return Origin(f"stable-diffusion-v2-{size}", "diffusers", version, "networks.lora")
    return Origin(name, _COMFYUI)


def _without_weight(keys: Mapping[str, str]) -> dict[str, str]:
    """Strip `.weight` from the keys of weights, and drop all others."""
    ending = ".weight"
    return {
        key.removesuffix(ending): target.removesuffix(ending) for key, target in keys.items() if key.endswith(ending)
    }


def _turned_round(aliases: Mapping[str, Any], rows: Mapping[str, int]) -> tuple[_Parts, frozenset[str]]:
    """Invert ComfyUI's map: native module → its diffusers modules, and the modules whose halves are swapped.

    rows: of each module's weight, 0 for modules other than Linears. A module whose parts differ in size, or do not fill
    it, is left out.
    """
    whole: dict[str, str] = {}
    slices: dict[str, dict[int, tuple[int, str]]] = {}
    swapped = set()
    for alias, target in aliases.items():
        if not alias.startswith("transformer."):
            continue
        diffusers_name = alias.removeprefix("transformer.")
        key, place, *function = (target, None) if isinstance(target, str) else target
        name = key.removeprefix("diffusion_model.").removesuffix(".weight")
        if place is not None:
            slices.setdefault(name, {})[place[1]] = (place[2], diffusers_name)
            continue
        if function:
            assert function == [comfy.utils.swap_scale_shift], name
            swapped.add(name)
        # Of two names for one module the shorter is a variant of some tools.
        whole[name] = max(whole.get(name, ""), diffusers_name, key=len)
    parts: dict[str, tuple[str, ...]] = {
        name: (diffusers_name,) for name, diffusers_name in whole.items() if name in rows
    }
    for name, by_start in slices.items():
        size = rows.get(name, 0) // len(by_start)
        if size and [(start, length) for start, (length, _) in sorted(by_start.items())] == [
            (index * size, size) for index in range(len(by_start))
        ]:
            parts[name] = tuple(diffusers_name for _, (_, diffusers_name) in sorted(by_start.items()))
    return parts, frozenset(swapped & parts.keys())


# Cached: a family is created for each MODEL, in many places.
@lru_cache(maxsize=4)
def _table(
    names: tuple[str, ...],
    parts: tuple[tuple[str, tuple[str, ...]], ...] = (),
    swapped: frozenset[str] = frozenset(),
    unet: bool = False,
    kohya_by_diffusers: bool = False,
    cut: frozenset[str] = frozenset(),
    gaps: tuple[Gap, ...] = (),
) -> NameTable:
    by_flat: dict[str, str] = {}
    for name in names:
        if (other := by_flat.setdefault(flat_name(name), name)) != name:
            raise ValueError(
                f"model has the layers {other} and {name}, which LoRA files call by one name; use another model."
            )
    parts_by_name = dict(parts)
    templates = tuple(dict.fromkeys(_NUMBER.sub("{}", name) for name in names if name not in parts_by_name))

    short = _shortened(parts_by_name, swapped)
    templates_of = {name: next((t for t, _ in _templates(name) if t in short), name) for name in cut}

    def make_table(extra_names: tuple[str, ...]) -> NameTable:
        return NameTable(
            short,
            extra_names,
            halves_swapped=swapped,
            by_rule=True,
            unet=unet,
            kohya_by_diffusers=kohya_by_diffusers,
            cut=frozenset(templates_of.values()),
            gaps=gaps,
        )

    table = make_table(templates)
    # `a.b_1` and `a.b.2` both match `a_b_{}` in kohya's keys: a name that the template doesn't recover is listed in
    # full.
    unmatched = tuple(
        name for flat, name in by_flat.items() if table.native(flat) != name and name not in parts_by_name
    )
    return make_table((*unmatched, *templates)) if unmatched else table


def _shortened(parts: _Parts, alone: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Compress names to templates: one number becomes "{}" if names that differ only in it map to parts that do so too.
    alone: names to keep in full."""
    groups: dict[str, list[str]] = {}
    for name in parts.keys() - alone:
        for template, _ in _templates(name):
            groups.setdefault(template, []).append(name)
    by_template: dict[str, tuple[str, ...]] = {}
    covered: set[str] = set(alone)
    for name in parts:
        for template, number in _templates(name) if name not in covered else ():
            if template_parts := _common_templates(
                template, number, parts[name], {n: parts[n] for n in groups[template]}
            ):
                by_template[template] = template_parts
                covered.update(groups[template])
                break
    return {
        name: diffusers_names for name, diffusers_names in parts.items() if name not in covered or name in alone
    } | by_template


def _templates(name: str) -> list[tuple[str, str]]:
    """Return, for each number in the name, the name with "{}" in its place, and the number."""
    return [(name[: match.start()] + "{}" + name[match.end() :], match[0]) for match in _NUMBER.finditer(name)]


def _common_templates(template: str, number: str, parts: tuple[str, ...], group: _Parts) -> tuple[str, ...] | None:
    """Return the templates of `parts` with the number replaced at one position, if they yield the parts of all names of
    the group."""
    if len(group) < 2:
        return None
    places = [_templates(part) for part in parts]
    for place in zip(*places, strict=False):
        if any(digits != number for _, digits in place):
            continue
        part_templates = tuple(part for part, _ in place)
        begin, end = template.split("{}")
        numbers = {name: name[len(begin) : len(name) - len(end)] for name in group}
        if all(group[name] == tuple(filled(part, [n]) for part in part_templates) for name, n in numbers.items()):
            return part_templates
    return None

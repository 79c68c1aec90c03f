"""The names of a model's weights in LoRA files: ComfyUI's own, those of our tables, and those that follow by rule."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.lora
import comfy.utils

from ...models.convolutions import layer_shapes
from ...models.name_table import NameTable, flat_name
from .patches import Target
from .spellings import unwrapped


@dataclass(frozen=True)
class Fused:
    """Several weights of the model that a file holds as one, in the order of its rows.

    keys: the weights.
    rows: rows of each.
    """

    keys: tuple[str, ...]
    rows: tuple[int, ...]


# Query, key and value as three layers, and as one.
_TRIOS = (
    (("q", "k", "v"), ("qkv",)),
    (("to_q", "to_k", "to_v"), ("to_qkv", "qkv")),
    (("q_proj", "k_proj", "v_proj"), ("qkv_proj", "qkv")),
    (("add_q_proj", "add_k_proj", "add_v_proj"), ("to_added_qkv",)),
)


class KeyMap:
    """Names of a model's weights in LoRA files, with and without wrappers.

    names: each name without its tensor's suffix → the weight, a part of one, or several.
    order: the targets' places in the order in which ComfyUI reads them.
    """

    def __init__(self, model: Any, table: NameTable):
        core_names: dict[str, Target] = comfy.lora.model_lora_keys_unet(model, {})
        shapes = layer_shapes(model)
        dotted = _dotted_names(shapes, table)
        by_rule = {**dict(_parts_by_rule(shapes)), **dict(_fused_by_rule(shapes, dotted))}
        # ComfyUI's own meaning of a name always comes first, then the table's.
        exact: dict[str, Target | Fused] = dict(core_names)
        for names in (dotted, by_rule):
            for name, target in names.items():
                exact.setdefault(name, target)
        self.names = exact
        self.order = {target: place for place, target in enumerate(dict.fromkeys(exact.values()))}
        self._bare = _bare_names((exact, _flat(dotted), _flat(by_rule)))

    def find(self, module: str) -> Target | Fused | None:
        """Find the weights that a file's name means; None if the model has no such module."""
        for name in unwrapped(module):
            target = self.names.get(name)
            if target is None:
                target = self._bare.get(name)
            if target is not None:
                return target
        return None


def _dotted_names(shapes: Mapping[str, tuple[int, int]], table: NameTable) -> dict[str, Target | Fused]:
    """Return the model's own names, and diffusers' of the table."""
    names: dict[str, Target | Fused] = {name: f"diffusion_model.{name}.weight" for name in shapes}
    for name, (rows, columns) in shapes.items():
        key = f"diffusion_model.{name}.weight"
        parts = table.diffusers(name)
        start = 0
        for part, size in zip(parts, table.diffusers_rows(name, rows, columns) if parts else (), strict=True):
            place: Target = key if len(parts) == 1 else (key, (0, start, size))
            if name in table.halves_swapped:
                place = (key, None, comfy.utils.swap_scale_shift)
            start += size
            names.setdefault(part, place)
    return names


def _parts_by_rule(shapes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Target]]:
    """Yield the names of query, key and value of each layer that is three times as high as wide: in another shape the
    heads of keys and values may be fewer."""
    fused_names = {fused: parts for parts, names in _TRIOS for fused in names}
    for name, (rows, columns) in shapes.items():
        owner, dot, last = name.rpartition(".")
        if last not in fused_names or rows != 3 * columns:
            continue
        for parts, names in _TRIOS:
            if last in names:
                for number, part in enumerate(parts):
                    yield f"{owner}{dot}{part}", (f"diffusion_model.{name}.weight", (0, number * columns, columns))


def _fused_by_rule(
    shapes: Mapping[str, tuple[int, int]], dotted: Mapping[str, Target | Fused]
) -> Iterator[tuple[str, Target | Fused]]:
    """Yield the names of fused layers of which the model, or diffusers, has query, key and value."""
    for name in dotted:
        owner, dot, last = name.rpartition(".")
        for parts, fused_names in _TRIOS:
            if last != parts[0]:
                continue
            targets = [dotted.get(f"{owner}{dot}{part}") for part in parts]
            if (fused := _joined(targets, shapes)) is not None:
                for fused_name in fused_names:
                    yield f"{owner}{dot}{fused_name}", fused


def _joined(targets: Iterable[Target | Fused | None], shapes: Mapping[str, tuple[int, int]]) -> Target | Fused | None:
    """Join consecutive parts of one weight, or whole weights of one width; None for anything else."""
    targets = list(targets)
    if all(isinstance(target, str) for target in targets):
        return _joined_weights([str(target) for target in targets], shapes)
    if not all(isinstance(target, tuple) and len(target) == 2 and target[1] for target in targets):
        return None
    return _joined_parts([(target[0], target[1]) for target in targets if isinstance(target, tuple)], shapes)


def _joined_weights(keys: Sequence[str], shapes: Mapping[str, tuple[int, int]]) -> Fused | None:
    """Join whole weights of one width; None for others."""
    sizes = [shapes[layer_of(key)] for key in keys]
    if len({columns for _, columns in sizes}) > 1:
        return None
    return Fused(tuple(keys), tuple(rows for rows, _ in sizes))


def _joined_parts(
    parts: Sequence[tuple[str, tuple[int, int, int]]], shapes: Mapping[str, tuple[int, int]]
) -> Target | None:
    """Join parts (key, (axis, start, size)) that follow on one another in one weight; None for others."""
    key, (axis, start, _) = parts[0]
    end = start
    for other, (other_axis, begin, size) in parts:
        if (other, other_axis, begin) != (key, axis, end):
            return None
        end += size
    return key if (start, end) == (0, shapes[layer_of(key)][0]) else (key, (axis, start, end - start))


def layer_of(key: str) -> str:
    """Return the native name of the module that a weight key of the model belongs to."""
    return key.removeprefix("diffusion_model.").removesuffix(".weight")


def _flat(names: Mapping[str, Target | Fused]) -> dict[str, Target | Fused]:
    return {flat_name(name): target for name, target in names.items()}


def _bare_names(groups: Iterable[Mapping[str, Target | Fused]]) -> dict[str, Target | Fused]:
    """Return the names without wrappers. One that two weights would have, at the same number of wrappers, is left
    out."""
    bare: dict[str, Target | Fused] = {}
    for names in groups:
        layers: list[dict[str, Target | Fused | None]] = []
        for name, target in names.items():
            for depth, inner in enumerate(unwrapped(name)):
                if depth == len(layers):
                    layers.append({})
                layer = layers[depth]
                layer[inner] = target if layer.get(inner, target) == target else None
        for layer in layers:
            for name, weight in layer.items():
                if weight is not None:
                    bare.setdefault(name, weight)
    return bare

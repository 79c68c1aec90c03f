"""Reads a LoRA of any naming that ComfyUI or this pack knows, as updates of the model's own modules.

Names and layouts are ComfyUI's (`comfy.lora`), and those of our tables (`train.names`), which know more of what
diffusers and PEFT write. Layers that ComfyUI holds as one (q, k and v) are put together again, exactly.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import comfy.lora
import comfy.lora_convert
import comfy.utils
import comfy.weight_adapter
import torch
from comfy.weight_adapter.loha import LoHaAdapter
from comfy.weight_adapter.lokr import LoKrAdapter
from comfy.weight_adapter.lora import LoRAAdapter
from comfy.weight_adapter.oft import OFTAdapter
from torch import Tensor

from ..models.family import Family, linear_shapes
from .lora_dense import size_of
from .lora_model import ALPHA, DOWN, UP, LowRank
from .names import TABLES, flat_name

DORA = "dora_scale"
Target = str | tuple[Any, ...]
"""A weight of the model, or (weight, (axis, start, length) or None, function or absent) for a part of one."""
Patches = dict[Target, Any]
Parts = dict[str, Tensor]
"""The tensors of one module by their suffix in kohya's names, fp32."""

# What ComfyUI's adapters hold in `weights`, in their order, by the suffixes of kohya's and LyCORIS' files.
_ORDERS: dict[type, tuple[str, ...]] = {
    LoRAAdapter: (UP, DOWN, ALPHA, "lora_mid.weight", DORA, "reshape_weight"),
    LoHaAdapter: ("hada_w1_a", "hada_w1_b", ALPHA, "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", DORA),
    LoKrAdapter: (*("lokr_w1", "lokr_w2", ALPHA, "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", "lokr_t2", DORA),),
    OFTAdapter: ("oft_blocks", "rescale", ALPHA, DORA),
}
_TEXT_ENCODER = ("lora_te", "text_encoder", "text_encoders.", "clip_l.", "t5xxl.")


@dataclass(frozen=True)
class ReadLora:
    """What a file holds for this model. modules: of each Linear, by its native name, the tensors by suffix.
    others: weights whose update is of another kind (differences of norms and biases, convolutions).
    text_encoder: how many keys are for the text encoder. unknown: keys of no module of this model."""

    modules: dict[str, Parts]
    others: tuple[str, ...]
    text_encoder: int
    unknown: tuple[str, ...]


class DoesNotFit(ValueError):
    """An update is of another shape than the layer that it is named for: which, and both shapes."""


def read_patches(lora: Mapping[str, Tensor], family: Family, model: Any) -> tuple[Patches, list[str]]:
    """(the LoRA as ComfyUI's weight patches of this model, the keys that are of no module of it)."""
    plain = comfy.lora_convert.convert_lora({key.replace("_orig_mod.", ""): tensor for key, tensor in lora.items()})
    patches = comfy.lora.load_lora(plain, _key_map(family, model), log_missing=False)
    # All adapters share one set, in which ComfyUI collects whatever key it has taken.
    known: set[str] = next((patch.loaded_keys for patch in patches.values() if hasattr(patch, "loaded_keys")), set())
    return patches, [key for key in plain if key not in known]


def read_lora(lora: Mapping[str, Tensor], family: Family, model: Any) -> ReadLora:
    """The updates that a LoRA holds for the Linears of this model. Nothing is left out silently."""
    patches, unknown = read_patches(lora, family, model)
    shapes = linear_shapes(model)
    whole: dict[str, Parts] = {}
    pieces: dict[str, list[tuple[int, LowRank]]] = {}
    others: list[str] = []
    for target, patch in patches.items():
        key, place, function = _unpacked(target)
        name = key.removeprefix("diffusion_model.").removesuffix(".weight")
        parts = _parts(patch)
        if parts is None or name not in shapes or not key.endswith(".weight"):
            others.append(key.removeprefix("diffusion_model."))
        elif place is None and function is None:
            whole[name] = parts
        elif (piece := _low_rank(parts)) is None or (place and place[0] != 0):
            others.append(name)
        else:
            check_shape(target, patch, shapes)
            up = piece.up if function is None else function(piece.up)
            pieces.setdefault(name, []).append((place[1] if place else 0, LowRank(piece.down, up, piece.alpha)))
    fused = {name: _tensors(put_together(cut, shapes[name][0])) for name, cut in pieces.items() if name not in whole}
    encoder = [key for key in unknown if key.startswith(_TEXT_ENCODER)]
    rest = tuple(key for key in unknown if key not in set(encoder))
    return ReadLora(whole | fused, tuple(others), len(encoder), rest)


def put_together(pieces: list[tuple[int, LowRank]], rows: int) -> LowRank:
    """One update of `rows` rows from updates of some of them, each with the row that it begins at; delta W is the same.

    Pieces over one and the same `down` keep its rank; others stand below each other, so that the ranks add up.
    """
    pieces = sorted(pieces, key=lambda piece: piece[0])
    first = pieces[0][1].down
    if all(torch.equal(piece.down, first) for _, piece in pieces):
        up = first.new_zeros(rows, len(first))
        for start, piece in pieces:
            up[start : start + len(piece.up)] = piece.scaled_up
        return LowRank(first, up, float(len(first)))
    rank = sum(piece.rank for _, piece in pieces)
    up, used = first.new_zeros(rows, rank), 0
    for start, piece in pieces:
        up[start : start + len(piece.up), used : used + piece.rank] = piece.scaled_up
        used += piece.rank
    return LowRank(torch.cat([piece.down for _, piece in pieces]), up, float(rank))


def _key_map(family: Family, model: Any) -> dict[str, Target]:
    """ComfyUI's names of this model's weights, and what they miss of diffusers' and PEFT's."""
    known: dict[str, Target] = comfy.lora.model_lora_keys_unet(model, {})
    table = next(table for table in TABLES if table.family == family.name)
    for name, (rows, columns) in linear_shapes(model).items():
        key = f"diffusion_model.{name}.weight"
        for prefix in ("", "transformer.", "base_model.model."):
            known.setdefault(f"{prefix}{name}", key)
        targets, start = table.diffusers(name), 0
        for target, size in zip(targets, table.diffusers_rows(name, rows, columns) if targets else (), strict=True):
            place: Target = key if len(targets) == 1 else (key, (0, start, size))
            if name in table.halves_swapped:
                place = (key, None, comfy.utils.swap_scale_shift)
            start += size
            flat = flat_name(target)
            for alias in (target, f"transformer.{target}", f"diffusion_model.{target}", f"base_model.model.{target}"):
                known.setdefault(alias, place)
            for alias in (f"lora_transformer_{flat}", f"lora_unet_{flat}", f"lycoris_{flat}"):
                known.setdefault(alias, place)
    return known


def target_shape(target: Target, shapes: Mapping[str, tuple[int, int]]) -> tuple[str, tuple[int, int] | None]:
    """(the native name, the shape of what a patch changes, None where it is no Linear's). shapes: of the Linears."""
    key, place, _ = _unpacked(target)
    name = key.removeprefix("diffusion_model.").removesuffix(".weight")
    shape = shapes.get(name) if key.endswith(".weight") else None
    return name, (place[2], shape[1]) if shape and place else shape


def check_shape(target: Target, patch: Any, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raises DoesNotFit where a patch is for a weight of another shape; ComfyUI would leave the weight as it is, and
    only log it. shapes: of the Linears."""
    layer, here = target_shape(target, shapes)
    there = patch_shape(patch)
    if here is None or there is None:
        return
    if any(one != other for one, other in zip(there, here, strict=True) if one):
        rows, columns = (str(side or "any") for side in there)
        raise DoesNotFit(f"{layer}: {rows} x {columns} there, {here[0]} x {here[1]} here")


def patch_shape(patch: Any) -> tuple[int, int] | None:
    """(out, in) of the weight that a patch of ComfyUI's is for, 0 for a side that it does not tell; None where it tells
    neither."""
    if isinstance(patch, tuple) and patch and patch[0] == "diff":
        difference = patch[1][0]
        return tuple(difference.shape) if difference.ndim == 2 else None
    if (parts := _parts(patch)) is None or "reshape_weight" in parts:
        return None
    if UP in parts:
        return len(parts[UP]), parts[DOWN].shape[1]
    if "oft_blocks" in parts:
        blocks = parts["oft_blocks"]
        return blocks.shape[0] * blocks.shape[1], 0
    return size_of(parts)


def _unpacked(target: Target) -> tuple[str, tuple[int, int, int] | None, Callable[[Tensor], Tensor] | None]:
    if isinstance(target, str):
        return target, None, None
    key, place, *function = target
    return key, place, function[0] if function else None


def _parts(patch: Any) -> Parts | None:
    """The tensors of an adapter of ComfyUI's; None for what is none."""
    order = _ORDERS.get(type(patch))
    if order is None:
        return None
    parts = dict(_present(order, patch.weights))
    if UP in parts:
        parts[UP], parts[DOWN] = parts[UP].flatten(1), parts[DOWN].flatten(1)
        parts.setdefault(ALPHA, torch.tensor(float(len(parts[DOWN]))))
    if "hada_w1_b" in parts:
        parts.setdefault(ALPHA, torch.tensor(float(len(parts["hada_w1_b"]))))
    if (pair := parts.get("lokr_w2_b", parts.get("lokr_w1_b"))) is not None:
        parts.setdefault(ALPHA, torch.tensor(float(len(pair))))
    return parts


def _present(order: tuple[str, ...], weights: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    for suffix, value in zip(order, weights, strict=True):
        if value is not None:
            yield suffix, torch.as_tensor(value).detach().to("cpu", torch.float32)


def _low_rank(parts: Parts) -> LowRank | None:
    return LowRank(parts[DOWN], parts[UP], float(parts[ALPHA])) if parts.keys() == {DOWN, UP, ALPHA} else None


def _tensors(update: LowRank) -> Parts:
    return {DOWN: update.down, UP: update.up, ALPHA: torch.tensor(update.alpha)}


__all__ = ["DoesNotFit", "Parts", "ReadLora", "check_shape", "put_together", "read_lora", "read_patches"]

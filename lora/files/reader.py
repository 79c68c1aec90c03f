"""Read a LoRA of any naming that ComfyUI or this pack knows, as updates of the model's own modules.

Names and layouts are ComfyUI's (`comfy.lora`), and those of our tables (`models.name_table`), which cover more of the
names that diffusers and PEFT write. Layers that ComfyUI fuses (q, k and v) are joined exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import comfy.lora
import comfy.lora_convert
import comfy.utils
import torch
from torch import Tensor

from ...models.convolutions import layer_shapes
from ...models.family import Family
from ...models.name_table import flat_name, uncompiled
from .lora_model import ALPHA, DOWN, UP, LowRank
from .patches import DoesNotFit, Patch, Target

Patches = dict[Target, Any]
Parts = dict[str, Tensor]
"""The tensors of one module by their suffix in kohya's names, fp32."""

_TEXT_ENCODER = ("lora_te", "text_encoder", "text_encoders.", "clip_l.", "t5xxl.")
# Suffixes that the reader accepts besides those of adapters.
_SCALARS = (ALPHA, "row_offset")
_WHOLE = ("diff", "diff_b", "set_weight", "w_norm", "b_norm", ALPHA, "dora_scale")


@dataclass(frozen=True)
class ReadLora:
    """The content of a LoRA file for one model.

    modules: tensors by suffix, of the layers whose patches are those of one adapter or all low-rank.
    patches: of the weight of each trainable layer, by its native name, in the order in which ComfyUI applies them.
    other_weights: norms, biases, convolutions outside U-Nets.
    text_encoder: the number of keys for the text encoder.
    unknown: keys that match no module of this model.
    """

    modules: dict[str, Parts]
    patches: dict[str, list[Patch]]
    other_weights: tuple[str, ...]
    text_encoder: int
    unknown: tuple[str, ...]


def read_patches(lora: Mapping[str, Tensor], family: Family, model: Any) -> tuple[Patches, list[str]]:
    """Return (the LoRA as ComfyUI's weight patches of this model, the keys that match no module of it). Raises
    DoesNotFit if a part of an update is missing, or is of a kind that this pack does not know."""
    plain = comfy.lora_convert.convert_lora({uncompiled(key): tensor for key, tensor in lora.items()})
    names = _key_map(family, model)
    for key, tensor in plain.items():
        name, _, suffix = key.rpartition(".")
        if not isinstance(tensor, Tensor):
            raise DoesNotFit(f"{key} is a {type(tensor).__name__} and no tensor")
        if name in names and suffix in _SCALARS and tensor.numel() != 1:
            raise DoesNotFit(f"{key} has {tensor.numel()} numbers in place of one")
    try:
        patches = comfy.lora.load_lora(plain, names, log_missing=False)
    except KeyError as error:
        raise DoesNotFit(f"it holds only a part of an update: {error.args[0]} is missing") from error
    for target, content in patches.items():
        key, patch = Patch.from_entry(target, content)
        patch.check_known(name_of(key))
    # All adapters share one set, in which ComfyUI collects the keys that it has read.
    used: set[str] = next((patch.loaded_keys for patch in patches.values() if hasattr(patch, "loaded_keys")), set())
    whole = {key for key in plain for name, _, suffix in (key.rpartition("."),) if name in names and suffix in _WHOLE}
    return patches, [key for key in plain if key not in used | whole]


def read_lora(lora: Mapping[str, Tensor], family: Family, model: Any) -> ReadLora:
    """Read the updates that a LoRA holds for the layers of this model. Nothing is dropped silently."""
    weight_patches, unknown = read_patches(lora, family, model)
    shapes = layer_shapes(model)
    patches: dict[str, list[Patch]] = {}
    other_names: list[str] = []
    for target, content in weight_patches.items():
        key, patch = Patch.from_entry(target, content)
        name = layer_of(key)
        if key.endswith(".weight") and name in shapes:
            patches.setdefault(name, []).append(patch)
        else:
            other_names.append(name_of(key))
    modules = {name: parts for name, group in patches.items() if (parts := _as_one(group, name, shapes[name]))}
    encoder = [key for key in unknown if key.startswith(_TEXT_ENCODER)]
    rest = tuple(key for key in unknown if key not in set(encoder))
    return ReadLora(modules, patches, tuple(other_names), len(encoder), rest)


def layer_of(key: str) -> str:
    """Return the native name of the module that a weight key of the model belongs to."""
    return key.removeprefix("diffusion_model.").removesuffix(".weight")


def name_of(key: str) -> str:
    """Format a key of the model for messages; ComfyUI has no key for the bias of a part of a layer."""
    return "the bias of a part of a layer" if key == "().bias" else key.removeprefix("diffusion_model.")


def _as_one(patches: list[Patch], layer: str, shape: tuple[int, int]) -> Parts | None:
    """Return the patches of a layer (out, in) as the tensors of one adapter, exactly; None if they can't be joined."""
    if len(patches) == 1 and patches[0].is_complete:
        return _parts(patches[0])
    pieces: list[tuple[int, LowRank]] = []
    for patch in patches:
        parts = _parts(patch) or {}
        if parts.keys() != {DOWN, UP, ALPHA} or (patch.place and patch.place[0] != 0):
            return None
        patch.check(layer, shape)
        up = parts[UP] if patch.function is None else patch.function(parts[UP])
        pieces.append((patch.place[1] if patch.place else 0, LowRank(parts[DOWN], up, float(parts[ALPHA]))))
    update = join_rows(pieces, shape[0])
    return {DOWN: update.down, UP: update.up, ALPHA: torch.tensor(update.alpha)}


def join_rows(pieces: list[tuple[int, LowRank]], rows: int) -> LowRank:
    """Join updates of some rows, each with its first row, into one of `rows` rows; delta W is the same.

    Pieces that share one `down` keep its rank; others are stacked, so that the ranks add up.
    """
    pieces = sorted(pieces, key=lambda piece: piece[0])
    first = pieces[0][1].down
    if all(torch.equal(piece.down, first) for _, piece in pieces):
        up = first.new_zeros(rows, len(first))
        for start, piece in pieces:
            up[start : start + len(piece.up)] += piece.scaled_up
        return LowRank(first, up, float(len(first)))
    rank = sum(piece.rank for _, piece in pieces)
    up, used = first.new_zeros(rows, rank), 0
    for start, piece in pieces:
        up[start : start + len(piece.up), used : used + piece.rank] = piece.scaled_up
        used += piece.rank
    return LowRank(torch.cat([piece.down for _, piece in pieces]), up, float(rank))


def _key_map(family: Family, model: Any) -> dict[str, Target]:
    """Return ComfyUI's names of this model's weights, plus names of diffusers and PEFT that they lack."""
    key_map: dict[str, Target] = comfy.lora.model_lora_keys_unet(model, {})
    table = family.names
    for name, (rows, columns) in layer_shapes(model).items():
        key = f"diffusion_model.{name}.weight"
        for prefix in ("", "transformer.", "base_model.model."):
            key_map.setdefault(f"{prefix}{name}", key)
        targets, start = table.diffusers(name), 0
        for target, size in zip(targets, table.diffusers_rows(name, rows, columns) if targets else (), strict=True):
            place: Target = key if len(targets) == 1 else (key, (0, start, size))
            if name in table.halves_swapped:
                place = (key, None, comfy.utils.swap_scale_shift)
            start += size
            flat = flat_name(target)
            for alias in (target, f"transformer.{target}", f"diffusion_model.{target}", f"base_model.model.{target}"):
                key_map.setdefault(alias, place)
            for alias in (f"lora_transformer_{flat}", f"lora_unet_{flat}", f"lycoris_{flat}"):
                key_map.setdefault(alias, place)
    return key_map


def _parts(patch: Patch) -> Parts | None:
    """Return the tensors of an adapter by suffix; None for a patch that is not an adapter."""
    if isinstance(patch.content, tuple):
        return None
    parts = {suffix: tensor.to("cpu", torch.float32) for suffix, tensor in patch.tensors().items()}
    if UP in parts:
        parts[UP], parts[DOWN] = parts[UP].flatten(1), parts[DOWN].flatten(1)
        parts.setdefault(ALPHA, torch.tensor(float(len(parts[DOWN]))))
    if "hada_w1_b" in parts:
        parts.setdefault(ALPHA, torch.tensor(float(len(parts["hada_w1_b"]))))
    if (pair := parts.get("lokr_w2_b", parts.get("lokr_w1_b"))) is not None:
        parts.setdefault(ALPHA, torch.tensor(float(len(pair))))
    return parts

"""Read a LoRA of any known spelling as updates of the model's own modules.

Wrappers around names are removed as `spellings` knows them, and names are found in `key_map`: ComfyUI's own
(`comfy.lora`), those of our tables (`models.name_table`) and those that follow by rule. The update itself is read by
ComfyUI's adapters. Layers that ComfyUI fuses (q, k and v) are joined exactly.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import comfy.lora
import comfy.lora_convert
import torch
from torch import Tensor

from ...models.convolutions import layer_shapes
from ...models.family import Family
from ...models.name_table import NameTable, uncompiled
from .key_map import Fused, KeyMap, layer_of
from .lora_model import LowRank
from .patches import DoesNotFit, Patch, Target
from .spellings import ALPHA, DORA, DOWN, UP, is_text_encoder, split_key

Patches = dict[Target, Any]
Parts = dict[str, Tensor]
"""The tensors of one module by their suffix in kohya's names, fp32."""

# Suffixes that the reader accepts besides those of adapters.
_SCALARS = (ALPHA, "row_offset")
_WHOLE = ("diff", "diff_b", "set_weight", "w_norm", "b_norm", ALPHA, DORA)
_REPLACING = (("diff",), ("w_norm", "b_norm"), ("set_weight",))
_BY_ROWS = (UP, "diff", "diff_b", "set_weight", DORA)


@dataclass(frozen=True)
class LoraPatches:
    """A LoRA as ComfyUI's weight patches of one model.

    groups: the patches; a second update of a layer, under another name, is in the next group.
    unknown: keys of the file that match no module of the model.
    text_encoder: keys of text encoders.
    layers: modules of the file that are in the model, by the names of the file.
    other_layers: modules of the file that are not, without those of text encoders.
    doubled: weights of the model with several updates of the same rows.
    """

    groups: tuple[Patches, ...]
    unknown: tuple[str, ...]
    text_encoder: tuple[str, ...]
    layers: tuple[str, ...]
    other_layers: tuple[str, ...]
    doubled: tuple[str, ...]

    def entries(self) -> Iterator[tuple[Target, Any]]:
        """Yield each patch with its target, in the order in which ComfyUI applies them."""
        for group in self.groups:
            yield from group.items()


@dataclass(frozen=True)
class ReadLora:
    """The content of a LoRA file for one model.

    modules: tensors by suffix, of the layers whose patches are those of one adapter or all low-rank.
    patches: of the weight of each trainable layer, by its native name, in the order in which ComfyUI applies them.
    other_weights: norms, biases, convolutions outside U-Nets.
    text_encoder: the number of keys for the text encoder.
    unknown: keys that match no module of this model.
    doubled: weights with several updates of the same rows.
    other_layers: modules of the file that this model does not have.
    """

    modules: dict[str, Parts]
    patches: dict[str, list[Patch]]
    other_weights: tuple[str, ...]
    text_encoder: int
    unknown: tuple[str, ...]
    doubled: tuple[str, ...] = ()
    other_layers: tuple[str, ...] = ()


class _Update(NamedTuple):
    """The tensors of one update in the file.

    module: its name in the file.
    name: the same with the adapter's name, if it has one.
    tensors: by suffix.
    keys: of the file, by suffix.
    """

    module: str
    name: str
    tensors: dict[str, Tensor]
    keys: dict[str, str]

    def part(self, suffixes: tuple[str, ...]) -> "_Update":
        """Return the update with these tensors only."""
        tensors = {suffix: self.tensors[suffix] for suffix in suffixes if suffix in self.tensors}
        return _Update(self.module, self.name, tensors, {suffix: self.keys[suffix] for suffix in tensors})


def read_patches(lora: Mapping[str, Tensor], table: NameTable, model: Any) -> LoraPatches:
    """Read a LoRA as ComfyUI's weight patches of a model. table: of the names of this model.

    Raises DoesNotFit if a part of an update is missing, or is of a kind that this pack does not know.
    """
    plain = comfy.lora_convert.convert_lora({uncompiled(key): tensor for key, tensor in lora.items()})
    key_map = KeyMap(model, table)
    groups: list[list[tuple[_Update, Target]]] = []
    unread: list[str] = []
    other_modules: list[str] = []
    times: dict[Target, int] = {}
    for update in _updates(plain):
        target = key_map.find(update.module)
        pieces = _pieces(update, target) if target is not None else []
        if not pieces:
            unread += update.keys.values()
            if not all(map(is_text_encoder, update.keys.values())):
                other_modules.append(update.module)
            continue
        for piece in pieces:
            number = times.get(piece[1], 0)
            times[piece[1]] = number + 1
            groups += [[] for _ in range(number + 1 - len(groups))]
            groups[number].append(piece)
    read = []
    layers: list[str] = []
    for group in groups:
        group.sort(key=lambda piece: key_map.order.get(piece[1], 0))
        patches, unused = _read_group(group)
        read.append(patches)
        unread += unused
        for update, _ in group:
            group_layers = layers if set(update.keys.values()) - set(unused) else other_modules
            group_layers.append(update.module)
    encoder = tuple(key for key in unread if is_text_encoder(key))
    unknown = tuple(dict.fromkeys(key for key in unread if not is_text_encoder(key)))
    return LoraPatches(
        tuple(read), unknown, encoder, tuple(dict.fromkeys(layers)), tuple(dict.fromkeys(other_modules)), _doubled(read)
    )


def read_lora(lora: Mapping[str, Tensor], family: Family, model: Any) -> ReadLora:
    """Read the updates that a LoRA holds for the layers of this model. Nothing is dropped silently."""
    read = read_patches(lora, family.names, model)
    shapes = layer_shapes(model)
    patches: dict[str, list[Patch]] = {}
    other_names: list[str] = []
    for target, content in read.entries():
        key, patch = Patch.from_entry(target, content)
        name = layer_of(key)
        if key.endswith(".weight") and name in shapes:
            patches.setdefault(name, []).append(patch)
        else:
            other_names.append(name_of(key))
    modules = {name: parts for name, group in patches.items() if (parts := _as_one(group, name, shapes[name]))}
    other_weights = tuple(other_names)
    return ReadLora(
        modules, patches, other_weights, len(read.text_encoder), read.unknown, read.doubled, read.other_layers
    )


def _updates(lora: Mapping[str, Tensor]) -> list[_Update]:
    """Group the tensors of a file by module and adapter.

    A tensor without an adapter's name, such as an alpha, belongs to all adapters of its module. A whole difference or
    weight beside another update of a module is an update of its own.
    """
    updates: list[_Update] = []
    for by_adapter in _by_module(lora).values():
        for update in _with_common_tensors(by_adapter):
            updates += _divided(update)
    return updates


def _by_module(lora: Mapping[str, Tensor]) -> dict[str, dict[str, _Update]]:
    """Collect the tensors of each module, and of each of its adapters. Raises DoesNotFit for what is no tensor."""
    by_module: dict[str, dict[str, _Update]] = {}
    for key, tensor in lora.items():
        if not isinstance(tensor, Tensor):
            raise DoesNotFit(f"{key} is a {type(tensor).__name__} and no tensor")
        module, adapter, suffix = split_key(key)
        if "lora_magnitude_vector" in key and tensor.dim() == 1:
            tensor = tensor[:, None]  # one length for each row, as PEFT has them
        by_adapter = by_module.setdefault(module, {})
        while adapter in by_adapter and suffix in by_adapter[adapter].tensors:
            adapter += " again"  # one adapter in the spellings of two programs
        name = f"{module} ({adapter})" if adapter else module
        update = by_adapter.setdefault(adapter, _Update(module, name, {}, {}))
        update.tensors[suffix] = tensor
        update.keys[suffix] = key
    return by_module


def _with_common_tensors(by_adapter: Mapping[str, _Update]) -> list[_Update]:
    """Return the updates of a module, each with the tensors that have no adapter's name, unless these are an update."""
    common = by_adapter.get("")
    if common is None or len(by_adapter) == 1 or {DOWN, UP} & common.tensors.keys():
        return list(by_adapter.values())
    updates = [update for update in by_adapter.values() if update is not common]
    for update in updates:
        for suffix, tensor in common.tensors.items():
            update.tensors.setdefault(suffix, tensor)
            update.keys.setdefault(suffix, common.keys[suffix])
    return updates


def _divided(update: _Update) -> Iterator[_Update]:
    """Yield the whole differences and weights beside another update, and then the rest."""
    rest = tuple(update.tensors)
    for suffixes in _REPLACING:
        if suffixes[0] in rest and not set(rest) <= {*suffixes, "diff_b", ALPHA}:
            yield update.part(suffixes)
            rest = tuple(suffix for suffix in rest if suffix not in suffixes)
    yield update.part(rest)


def _pieces(update: _Update, target: Target | Fused) -> list[tuple[_Update, Target]]:
    """Return the update of each weight that a file's module means; none if it can't be divided."""
    if not isinstance(target, Fused):
        return [(update, target)]
    rows = sum(target.rows)
    fits = all(
        suffix in (DOWN, ALPHA) or (suffix in _BY_ROWS and tensor.dim() and len(tensor) == rows)
        for suffix, tensor in update.tensors.items()
    )
    if not fits or update.tensors.get(DOWN, torch.ones(1, 1)).dim() != 2:
        return []
    pieces: list[tuple[_Update, Target]] = []
    start = 0
    for key, size in zip(target.keys, target.rows, strict=True):
        tensors = {
            suffix: tensor[start : start + size] if suffix in _BY_ROWS else tensor
            for suffix, tensor in update.tensors.items()
        }
        pieces.append((_Update(update.module, update.name, tensors, update.keys), key))
        start += size
    return pieces


def _read_group(group: list[tuple[_Update, Target]]) -> tuple[Patches, list[str]]:
    """Read updates of different targets by ComfyUI's adapters. Returns (the patches, keys of the file not read)."""
    plain: dict[str, Tensor] = {}
    names: dict[str, Target] = {}
    origins: dict[str, str] = {}
    for update, target in group:
        name = update.name
        while name in names:  # pieces of one module
            name += "'"
        names[name] = target
        for suffix, tensor in update.tensors.items():
            key, origin = f"{name}.{suffix}", update.keys[suffix]
            if suffix in _SCALARS and tensor.numel() != 1:
                raise DoesNotFit(f"{origin} has {tensor.numel()} numbers in place of one")
            if not tensor.numel():
                raise DoesNotFit(f"{origin} is empty, as of a rank of 0")
            plain[key], origins[key] = tensor, origin
    try:
        patches: Patches = comfy.lora.load_lora(plain, names, log_missing=False)
    except KeyError as error:
        raise DoesNotFit(f"it holds only a part of an update: {error.args[0]} is missing") from error
    for target, content in patches.items():
        weight, patch = Patch.from_entry(target, content)
        patch.check_known(name_of(weight))
    # All adapters share one set, in which ComfyUI collects the keys that it has read.
    used: set[str] = next((patch.loaded_keys for patch in patches.values() if hasattr(patch, "loaded_keys")), set())
    used |= {key for key in plain if key.rpartition(".")[2] in _WHOLE}
    return patches, [origins[key] for key in plain if key not in used]


def _doubled(groups: list[Patches]) -> tuple[str, ...]:
    """Return the weights of which several patches change the same rows."""
    ranges: dict[str, list[tuple[int, float]]] = {}
    for group in groups:
        for target, content in group.items():
            key, patch = Patch.from_entry(target, content)
            axis, start, size = patch.place or (0, 0, float("inf"))
            ranges.setdefault(key, []).append((start, start + size) if axis == 0 else (0, float("inf")))
    doubled = []
    for key, spans in ranges.items():
        spans.sort()
        if any(begin < end for (_, end), (begin, _) in zip(spans, spans[1:], strict=False)):
            doubled.append(name_of(key))
    return tuple(doubled)


def name_of(key: str) -> str:
    """Format a key of the model for messages; ComfyUI has no key for the bias of a part of a layer."""
    return "the bias of a part of a layer" if key == "().bias" else key.removeprefix("diffusion_model.")


def _as_one(patches: list[Patch], layer: str, shape: tuple[int, int]) -> Parts | None:
    """Return the patches of a layer (out, in) as the tensors of one adapter, exactly; None if they can't be joined."""
    if len(patches) == 1 and patches[0].is_complete:
        return _parts(patches[0])
    return join_patches(patches, layer, shape)


def join_patches(patches: list[Patch], layer: str, shape: tuple[int, int]) -> Parts | None:
    """Return low-rank patches of a layer (out, in) as the tensors of one, exactly; None if one is of another kind."""
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

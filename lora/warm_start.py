"""Warm start: a run that starts from an existing LoRA, whose updates are fitted to the network's layers and rank.

A network of another algorithm than lora begins from a file of its own kind and size only. A LoRA begins from whatever
ComfyUI reads: what is low-rank is taken as it is, of anything else the best approximation of the network's rank.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..common.rng import generator
from ..models.adapters.base import Adapter, AdapterSpec
from ..models.adapters.lora import LoraAdapter
from ..models.adapters.registry import ADAPTERS
from ..models.convolutions import WeightShape, as_matrix, weight_shapes
from ..models.family import Family
from .files.lora_model import ALPHA, LowRank, low_rank
from .files.patches import EMPTY, DoesNotFit, Patch, delta_of, truncate_to_rank
from .files.reader import Parts, ReadLora, read_lora
from .options import NetworkOptions
from .plan import adapter_specs
from .source import LoraSource

OWN = "start_from"
NOTICEABLE = 1e-3  # what of an update may be lost unsaid


@dataclass(frozen=True)
class Fitted:
    """An update of another rank: down (rank, in), up (out, rank), and the loss ‖lost‖ / ‖delta W‖ (Frobenius)."""

    down: Tensor
    up: Tensor
    lost: float


def fit_to_rank(update: LowRank, start: Tensor, scale: float) -> Fitted:
    """Fit an update to another rank and scale: scale·up·down is its delta W, all fp32.

    start: (rank, in), what a new down begins from. Of the same rank, and of the same scale, the tensors are taken as
    they are. Where there is room, the rest of down is that of `start` and the rest of up zero: delta W is the same, and
    the rest can learn. Where there is none, the largest singular parts are taken, which lose least (Eckart & Young
    1936); they are found from QR factors, without delta W itself.
    """
    rank, own = len(start), update.alpha / update.rank
    down, up = update.down.float(), update.up.float()
    if own != scale:
        up = up * (own / scale)
    if update.rank == rank:
        return Fitted(down, up, 0.0)
    if update.rank < rank:
        rest = up.new_zeros(len(up), rank - update.rank)
        return Fitted(torch.cat((down, start[update.rank :].to(down))), torch.cat((up, rest), dim=1), 0.0)
    rows, upper = torch.linalg.qr(up.double())
    columns, lower = torch.linalg.qr(down.double().T)
    left, sizes, right = torch.linalg.svd(upper @ lower.T)
    total = float(sizes.square().sum())
    lost = math.sqrt(float(sizes[rank:].square().sum()) / total) if total else 0.0
    kept = min(rank, len(sizes))  # a narrow layer has fewer than any rank asks for
    root = sizes[:kept].sqrt()
    fitted_up = rows @ left[:, :kept] * root
    fitted_down = (columns @ right[:kept].T * root).T
    # Both matrices zero would stay so: what there is nothing for begins as in a new LoRA.
    empty = sizes[:kept] <= EMPTY * sizes[0]
    fitted_down = torch.where(empty[:, None], start[:kept].to(fitted_down), fitted_down)
    fitted_up = fitted_up.masked_fill(empty, 0)
    if kept < rank:
        fitted_up = torch.cat((fitted_up, fitted_up.new_zeros(len(fitted_up), rank - kept)), dim=1)
        fitted_down = torch.cat((fitted_down, start[kept:].to(fitted_down)))
    return Fitted(fitted_down.float().contiguous(), fitted_up.float().contiguous(), lost)


@dataclass(frozen=True)
class WarmStart:
    """The updates that a run starts from, by native name, of layers that it trains.

    source: the LoRA.
    modules: tensors of updates in the form of the adapters, or low-rank.
    dense: patches of updates of any other form, which a LoRA approximates.
    shapes: of the weights of the layers in `dense`.
    """

    source: LoraSource
    modules: Mapping[str, Parts]
    dense: Mapping[str, Sequence[Patch]]
    shapes: Mapping[str, WeightShape]

    @torch.no_grad()
    def load_into(self, adapters: Mapping[str, Adapter], read: Callable[[str], Tensor]) -> list[str]:
        """Load the adapters' master weights, layer by layer; returns a sentence about what a lower rank loses. read:
        gives a layer's frozen weight (out, in), fp32, with all patches of the model."""
        lost = {}
        for name, parts in self.modules.items():
            adapter = adapters[name]
            update = low_rank(parts)
            if isinstance(adapter, LoraAdapter) and update is not None:
                fitted = fit_to_rank(update, adapter.down.cpu(), adapter.scale)
                adapter.down.copy_(fitted.down)
                adapter.up.copy_(fitted.up)
                if update.rank > len(adapter.down):
                    lost[name] = fitted.lost
            else:
                adapter.load(parts)
        for name, patches in self.dense.items():
            adapter = adapters[name]
            assert isinstance(adapter, LoraAdapter), name
            left_out = self._take_dense(name, patches, adapter, partial(read, name))
            if left_out > NOTICEABLE:
                lost[name] = left_out
        if not lost:
            return []
        worst = max(lost, key=lambda name: lost[name])
        mean = sum(lost.values()) / len(lost)
        return [
            f"{self.source.input(OWN)} has a higher rank than the network in {len(lost)} layers, so {mean:.1%} of "
            f"their update is lost (most in {worst}: {lost[worst]:.1%}). Raise rank to keep all of it."
        ]

    def _take_dense(
        self, name: str, patches: Sequence[Patch], adapter: LoraAdapter, read: Callable[[], Tensor]
    ) -> float:
        """Load the largest singular parts of a layer's update; returns the part that is left out."""
        shape = self.shapes[name]
        try:
            full = delta_of(patches, shape, adapter.down.device, lambda: read().view(shape)).flatten(1)
        except ValueError as error:
            told = f"{self.source.input(OWN)}: {self.source.name}"
            raise ValueError(f"{told} can't be used as a start ({name}: {error}); choose another LoRA.") from error
        down, up, left_out = truncate_to_rank(full, len(adapter.down), adapter.scale, generator(0, "start", name))
        adapter.down[: len(down)].copy_(down)
        adapter.up[:, : len(down)].copy_(up)
        return left_out


def read_warm_start(
    options: NetworkOptions, family: Family, model: Any, targets: Sequence[str]
) -> tuple[WarmStart | None, list[str]]:
    """Read the warm start of a run and notes for the user; needs no weights of the model.

    Raises ValueError where the LoRA is of another model or of another algorithm than the network.
    """
    if options.start_from is None:
        return None, []
    name, shapes = f"{options.start_from.input(OWN)}: {options.start_from.name}", weight_shapes(model)
    try:
        found = read_lora(options.start_from.tensors(), family, model)
    except DoesNotFit as error:
        raise ValueError(
            f"{name} does not fit this model ({error}); choose a LoRA that was trained on this model."
        ) from error
    if not found.patches and found.others:
        raise ValueError(
            f"{name} changes {_some(found.others)} in a way that training can't start from; choose one that changes "
            "the weights of Linear layers, or put it on the MODEL with a LoRA loader."
        )
    if not found.patches:
        raise ValueError(
            f"{name} has no update for a layer of {family.title}; choose a LoRA that was trained on this model."
        )
    specs = adapter_specs(options, targets)
    taken = {layer: own for layer, own in found.patches.items() if layer in specs}
    if not taken:
        raise ValueError(
            f"{name} has updates only for layers that are not trained ({_some(list(found.patches))}); add "
            "them to targets."
        )
    for layer, own in taken.items():
        _check_layer(name, layer, own, found.modules.get(layer), specs[layer], shapes[layer])
    modules = {layer: parts for layer in taken if (parts := found.modules.get(layer)) is not None}
    if options.algorithm == "lora":
        modules = {layer: parts for layer, parts in modules.items() if low_rank(parts) is not None}
    dense = {layer: own for layer, own in taken.items() if layer not in modules}
    if options.training_adapter is not None:
        _check_apart_from_weights(name, dense)
    notes = _start_notes(options.start_from.input(OWN), found, taken, dense, targets)
    return WarmStart(options.start_from, modules, dense, {layer: shapes[layer] for layer in dense}), list(notes)


def _check_layer(
    name: str, layer: str, patches: Sequence[Patch], parts: Parts | None, spec: AdapterSpec, shape: WeightShape
) -> None:
    """Raise ValueError where the adapter of a layer cannot start from these patches. name: of the LoRA, with the input.
    parts: their tensors, where they are those of one adapter. shape: of the layer's weight."""
    kind = _form(patches)
    if spec.algorithm != "lora" and (parts is None or kind != spec.algorithm):
        held = ", ".join(sorted({suffix for patch in patches for suffix in patch.tensors()}))
        own = kind if kind in ADAPTERS and parts is not None else "lora"
        raise ValueError(
            f"{name} is a {kind} ({layer} has {held}) and the network trains {spec.algorithm}; set "
            f"algorithm to {own}, or choose another LoRA."
        )
    if not all(tensor.float().isfinite().all() for patch in patches for tensor in patch.tensors().values()):
        raise ValueError(f"{name} holds NaN or infinite values ({layer}); choose an earlier save of it.")
    try:
        if spec.algorithm != "lora" and parts is not None:
            _check_same(spec, layer, parts, *as_matrix(shape))
        else:
            for patch in patches:
                patch.check(layer, shape)
    except DoesNotFit as error:
        instead = "" if spec.algorithm == "lora" else ", or set rank and alpha as it was trained with"
        raise ValueError(
            f"{name} does not fit this model and network ({error}); choose a LoRA of this model{instead}."
        ) from error


def _check_apart_from_weights(name: str, dense: Mapping[str, Sequence[Patch]]) -> None:
    """Raise ValueError for an update that is worked out on the weights: those with the training adapter in them are
    not the ones that the LoRA is used on. name: of the LoRA, with the input."""
    for layer, patches in dense.items():
        if any(patch.needs_weight for patch in patches):
            raise ValueError(
                f"{name} is a {_form(patches)} ({layer}), worked out on the weights, which training_adapter changes "
                "while it trains; begin from a LoRA of another kind, or set training_adapter to none."
            )


def _start_notes(
    told: str, found: ReadLora, taken: Mapping[str, Any], dense: Mapping[str, Sequence[Patch]], targets: Sequence[str]
) -> Iterator[str]:
    if dense:
        forms = Counter(_form(own) for own in dense.values())
        held = ", ".join(f"{form} in {count} layer{'s' if count > 1 else ''}" for form, count in forms.items())
        (first, *more) = forms
        whole = first in ADAPTERS and not more and dense.keys() == taken.keys() <= found.modules.keys()
        yield (
            f"{told} is {held}; training starts from the closest LoRA of this rank."
            + (f" With algorithm {first} and its own rank and alpha it would continue unchanged." if whole else "")
        )
    left = [layer for layer in found.patches if layer not in taken]
    if left:
        yield (
            f"{told} also has updates for {len(left)} layers that are not trained, and these are dropped: "
            f"{_some(left)}. To keep them, add them to targets."
        )
    if found.others:
        yield f"{told} also changes weights that no adapter can hold, and these are dropped: {_some(found.others)}."
    if found.text_encoder:
        yield f"{told} also has {found.text_encoder} keys for the text encoder, which are ignored."
    if found.unknown:
        yield f"{told} has keys that match no layer of this model and are ignored: {_some(found.unknown)}."
    if anew := [layer for layer in targets if layer not in taken]:
        yield f"{len(anew)} of the {len(targets)} trained layers are not in {told} and start from zero: {_some(anew)}."


def _form(patches: Sequence[Patch]) -> str:
    return " and ".join(dict.fromkeys(patch.form for patch in patches))


def _check_same(spec: AdapterSpec, layer: str, parts: Parts, rows: int, columns: int) -> None:
    """Raises DoesNotFit where the tensors are not those of an adapter of this size and alpha on a layer (rows,
    columns)."""
    with torch.device("meta"):
        adapter = ADAPTERS[spec.algorithm](spec, rows, columns)
    own = adapter.tensors()
    if {"lokr_w1", "lokr_w2"} <= parts.keys():
        own.pop(ALPHA, None)  # no reader uses it where both are whole
        parts = {suffix: tensor for suffix, tensor in parts.items() if suffix != ALPHA}
    if own.keys() != parts.keys():
        raise DoesNotFit(f"{layer}: {', '.join(sorted(parts))} there, {', '.join(sorted(own))} here")
    for suffix, tensor in own.items():
        if suffix == ALPHA:
            if float(parts[ALPHA]) != float(tensor):
                raise DoesNotFit(f"{layer}: alpha {float(parts[ALPHA]):g} there, {float(tensor):g} here")
        elif tensor.shape != parts[suffix].shape:
            raise DoesNotFit(f"{layer}: {suffix} {tuple(parts[suffix].shape)} there, {tuple(tensor.shape)} here")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

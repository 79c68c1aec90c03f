"""Warm start: a run that starts from an existing LoRA, whose updates are fitted to the network's layers and rank.

A network of another algorithm than lora starts only from a file of its own kind and size. A LoRA starts from anything
that ComfyUI reads: low-rank updates are used as they are, others as the best approximation of the network's rank.
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
from ..common.text import quantity
from ..models.adapters.base import Adapter, AdapterSpec
from ..models.adapters.lora import LoraAdapter
from ..models.adapters.registry import ADAPTERS, adapter_kind, algorithms_with
from ..models.convolutions import WeightShape, as_matrix, weight_shapes
from ..models.family import Family
from .files.coverage import check_finite, encoder_note, no_layer_met
from .files.lora_model import LowRank, low_rank
from .files.patches import EMPTY, DoesNotFit, Patch, delta_of, truncate_to_rank
from .files.reader import Parts, ReadLora, read_lora
from .files.spellings import ALPHA
from .options import NetworkOptions
from .plan import adapter_specs
from .source import LoraSource

OWN = "start_from"
NOTICEABLE = 1e-3  # fraction of an update that may be lost without a note


@dataclass(frozen=True)
class Fitted:
    """An update at another rank.

    down: (rank, in) fp32.
    up: (out, rank) fp32.
    relative_error: Frobenius norm of its error over that of delta W.
    """

    down: Tensor
    up: Tensor
    relative_error: float


def fit_to_rank(update: LowRank, start: Tensor, scale: float) -> Fitted:
    """Fit an update to another rank and scale: scale·up·down is its delta W, all fp32.

    start: (rank, in), the initial down of a new LoRA. At the same rank the tensors are kept, up rescaled if the scale
        differs. At a higher rank the rest of down comes from `start` and the rest of up is zero: delta W is the same,
        and the rest can learn. At a lower rank the largest singular components are kept, which lose least (Eckart &
        Young 1936); they are computed from QR factors, without delta W itself.
    """
    rank, update_scale = len(start), update.alpha / update.rank
    down, up = update.down.float(), update.up.float()
    if update_scale != scale:
        up = up * (update_scale / scale)
    if update.rank == rank:
        return Fitted(down, up, 0.0)
    if update.rank < rank:
        rest = up.new_zeros(len(up), rank - update.rank)
        return Fitted(torch.cat((down, start[update.rank :].to(down))), torch.cat((up, rest), dim=1), 0.0)
    rows, upper = torch.linalg.qr(up.double())
    columns, lower = torch.linalg.qr(down.double().T)
    u, singular_values, vh = torch.linalg.svd(upper @ lower.T)
    total = float(singular_values.square().sum())
    loss = math.sqrt(float(singular_values[rank:].square().sum()) / total) if total else 0.0
    fitted_rank = min(rank, len(singular_values))  # a narrow layer may have fewer than `rank`
    root = singular_values[:fitted_rank].sqrt()
    fitted_up = rows @ u[:, :fitted_rank] * root
    fitted_down = (columns @ vh[:fitted_rank].T * root).T
    # If both matrices were zero they would stay zero: empty components start as in a new LoRA.
    empty = singular_values[:fitted_rank] <= EMPTY * singular_values[0]
    fitted_down = torch.where(empty[:, None], start[:fitted_rank].to(fitted_down), fitted_down)
    fitted_up = fitted_up.masked_fill(empty, 0)
    if fitted_rank < rank:
        fitted_up = torch.cat((fitted_up, fitted_up.new_zeros(len(fitted_up), rank - fitted_rank)), dim=1)
        fitted_down = torch.cat((fitted_down, start[fitted_rank:].to(fitted_down)))
    return Fitted(fitted_down.float().contiguous(), fitted_up.float().contiguous(), loss)


@dataclass(frozen=True)
class WarmStart:
    """Updates that a run starts from, by native name of the trained layers.

    source: the LoRA.
    modules: tensors of updates that are of the adapters' form, or low-rank.
    dense: patches of updates of any other form, which a LoRA approximates.
    shapes: of the weights of the layers in `dense`.
    """

    source: LoraSource
    modules: Mapping[str, Parts]
    dense: Mapping[str, Sequence[Patch]]
    shapes: Mapping[str, WeightShape]

    @torch.no_grad()
    def load_into(self, adapters: Mapping[str, Adapter], read: Callable[[str], Tensor]) -> list[str]:
        """Load the adapters' master weights, layer by layer; returns a sentence on the loss from a lower rank. read:
        returns a layer's frozen weight (out, in), fp32, with all patches of the model."""
        losses = {}
        for name, parts in self.modules.items():
            adapter = adapters[name]
            update = low_rank(parts)
            if isinstance(adapter, LoraAdapter) and update is not None:
                fitted = fit_to_rank(update, adapter.down.cpu(), adapter.scale)
                adapter.down.copy_(fitted.down)
                adapter.up.copy_(fitted.up)
                if update.rank > len(adapter.down):
                    losses[name] = fitted.relative_error
            else:
                adapter.load(parts)
        for name, patches in self.dense.items():
            adapter = adapters[name]
            assert isinstance(adapter, LoraAdapter), name
            left_out = self._take_dense(name, patches, adapter, partial(read, name))
            if left_out > NOTICEABLE:
                losses[name] = left_out
        if not losses:
            return []
        worst = max(losses, key=lambda name: losses[name])
        mean = sum(losses.values()) / len(losses)
        return [
            f"{self.source.input(OWN)} has a higher rank than the network in {quantity(len(losses), 'layer')}, so "
            f"{mean:.1%} of their update is lost (most in {worst}: {losses[worst]:.1%}). Raise rank to keep all of it."
        ]

    def _take_dense(
        self, name: str, patches: Sequence[Patch], adapter: LoraAdapter, read: Callable[[], Tensor]
    ) -> float:
        """Load the largest singular components of a layer's update; returns the fraction that is left out."""
        shape = self.shapes[name]
        try:
            full = delta_of(patches, shape, adapter.down.device, lambda: read().view(shape)).flatten(1)
        except ValueError as error:
            label = f"{self.source.input(OWN)}: {self.source.name}"
            raise ValueError(f"{label} can't be used as a start ({name}: {error}); choose another LoRA.") from error
        down, up, left_out = truncate_to_rank(full, len(adapter.down), adapter.scale, generator(0, "start", name))
        adapter.down[: len(down)].copy_(down)
        adapter.up[:, : len(down)].copy_(up)
        return left_out


def read_warm_start(
    options: NetworkOptions, family: Family, model: Any, targets: Sequence[str]
) -> tuple[WarmStart | None, list[str]]:
    """Read the warm start of a run and notes for the user; needs no weights of the model.

    Raises ValueError if the LoRA is of another model or of another algorithm than the network.
    """
    if options.start_from is None:
        return None, []
    name, shapes = f"{options.start_from.input(OWN)}: {options.start_from.name}", weight_shapes(model)
    try:
        tensors = options.start_from.tensors()
        check_finite(tensors, name)
        lora = read_lora(tensors, family, model)
    except DoesNotFit as error:
        raise ValueError(f"{name} does not fit this model ({error}); choose a LoRA of this model.") from error
    if not lora.patches and lora.other_weights:
        raise ValueError(
            f"{name} changes {_first_names(lora.other_weights)} in a way that training can't start from; choose one "
            "that changes the weights of Linear layers, or put it on the MODEL with a LoRA loader."
        )
    if not lora.patches:
        raise ValueError(no_layer_met(name, lora.other_layers, (), family, model))
    specs = adapter_specs(options, targets)
    trained = {layer: patches for layer, patches in lora.patches.items() if layer in specs}
    if not trained:
        raise ValueError(
            f"{name} has updates only for layers that are not trained ({_first_names(list(lora.patches))}); add "
            "them to targets."
        )
    for layer, patches in trained.items():
        _check_layer(name, layer, patches, lora.modules.get(layer), specs[layer], shapes[layer])
    modules = {layer: parts for layer in trained if (parts := lora.modules.get(layer)) is not None}
    if options.kind.fits_any:
        modules = {layer: parts for layer, parts in modules.items() if low_rank(parts) is not None}
    dense = {layer: patches for layer, patches in trained.items() if layer not in modules}
    if options.training_adapter is not None:
        _check_apart_from_weights(name, dense)
    notes = _start_notes(options.start_from.input(OWN), lora, trained, dense, targets)
    return WarmStart(options.start_from, modules, dense, {layer: shapes[layer] for layer in dense}), list(notes)


def _check_layer(
    name: str, layer: str, patches: Sequence[Patch], parts: Parts | None, spec: AdapterSpec, shape: WeightShape
) -> None:
    """Raise ValueError if the adapter of a layer cannot start from these patches. name: of the LoRA, with the input.
    parts: their tensors, if they form one adapter. shape: of the layer's weight."""
    form, fits_any = _form(patches), adapter_kind(spec).fits_any
    if not fits_any and (parts is None or form != spec.algorithm):
        suffixes = ", ".join(sorted({suffix for patch in patches for suffix in patch.tensors()}))
        algorithm = form if form in ADAPTERS and parts is not None else algorithms_with("fits_any")[0]
        raise ValueError(
            f"{name} is a {form} ({layer} has {suffixes}) and the network trains {spec.algorithm}; set "
            f"algorithm to {algorithm}, or choose another LoRA."
        )
    try:
        if not fits_any and parts is not None:
            _check_same(spec, layer, parts, *as_matrix(shape))
        else:
            for patch in patches:
                patch.check(layer, shape)
    except DoesNotFit as error:
        instead = "" if fits_any else ", or set rank and alpha as it was trained with"
        raise ValueError(
            f"{name} does not fit this model and network ({error}); choose a LoRA of this model{instead}."
        ) from error


def _check_apart_from_weights(name: str, dense: Mapping[str, Sequence[Patch]]) -> None:
    """Raise ValueError for an update computed from the weights: weights with the training adapter in them are not those
    that the LoRA is used on. name: of the LoRA, with the input."""
    for layer, patches in dense.items():
        if any(patch.needs_weight for patch in patches):
            raise ValueError(
                f"{name} is a {_form(patches)} ({layer}), worked out on the weights, which training_adapter changes "
                "while it trains; begin from a LoRA of another kind, or set training_adapter to none."
            )


def _start_notes(
    input_name: str,
    lora: ReadLora,
    trained: Mapping[str, Any],
    dense: Mapping[str, Sequence[Patch]],
    targets: Sequence[str],
) -> Iterator[str]:
    if dense:
        forms = Counter(_form(patches) for patches in dense.values())
        contents = ", ".join(f"{form} in {quantity(count, 'layer')}" for form, count in forms.items())
        (first, *rest) = forms
        whole = first in ADAPTERS and not rest and dense.keys() == trained.keys() <= lora.modules.keys()
        yield (
            f"{input_name} is {contents}; training starts from the closest LoRA of this rank."
            + (f" With algorithm {first} and its own rank and alpha it would continue unchanged." if whole else "")
        )
    dropped = [layer for layer in lora.patches if layer not in trained]
    if dropped:
        layers = quantity(len(dropped), "layer that is", "layers that are")
        yield (
            f"{input_name} also has updates for {layers} not trained, and these are dropped: "
            f"{_first_names(dropped)}. To keep them, add them to targets."
        )
    if lora.other_weights:
        yield (
            f"{input_name} also changes weights that no adapter can hold, and these are dropped: "
            f"{_first_names(lora.other_weights)}."
        )
    if lora.text_encoder:
        yield encoder_note(input_name, lora.text_encoder)
    if lora.unknown:
        yield f"{input_name} has keys that match no layer of this model and are ignored: {_first_names(lora.unknown)}."
    if lora.doubled:
        yield f"{input_name} has several updates of one layer, which are added up: {_first_names(lora.doubled)}."
    if fresh := [layer for layer in targets if layer not in trained]:
        trained_layers = f"of the {quantity(len(targets), 'trained layer')}"
        yield (
            f"{quantity(len(fresh), f'{trained_layers} is', f'{trained_layers} are')} not in {input_name} and "
            f"{'starts' if len(fresh) == 1 else 'start'} from zero: {_first_names(fresh)}."
        )


def _form(patches: Sequence[Patch]) -> str:
    return " and ".join(dict.fromkeys(patch.form for patch in patches))


def _check_same(spec: AdapterSpec, layer: str, parts: Parts, rows: int, columns: int) -> None:
    """Raise DoesNotFit if the tensors are not those of an adapter of this size and alpha on a layer (rows, columns)."""
    with torch.device("meta"):
        adapter = adapter_kind(spec)(spec, rows, columns)
    expected, parts = adapter.read_tensors(adapter.tensors()), adapter.read_tensors(parts)
    if expected.keys() != parts.keys():
        raise DoesNotFit(f"{layer}: {', '.join(sorted(parts))} there, {', '.join(sorted(expected))} here")
    for suffix, tensor in expected.items():
        if suffix == ALPHA:
            if float(parts[ALPHA]) != float(tensor):
                raise DoesNotFit(f"{layer}: alpha {float(parts[ALPHA]):g} there, {float(tensor):g} here")
        elif tensor.shape != parts[suffix].shape:
            raise DoesNotFit(f"{layer}: {suffix} {tuple(parts[suffix].shape)} there, {tuple(tensor.shape)} here")


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

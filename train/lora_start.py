"""A run that begins from an existing LoRA: its updates, fitted to the network's layers and rank."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models.adapters import ADAPTERS, Adapter, AdapterSpec, LoraAdapter
from ..models.family import Family, linear_shapes
from .draws import generator
from .lora_dense import DENSE, EMPTY, cut_to_rank, delta_of, size_of
from .lora_model import ALPHA, LowRank, low_rank
from .lora_reader import DORA, DoesNotFit, Parts, ReadLora, read_lora
from .network_plan import adapter_specs
from .options import NetworkOptions

NOTICEABLE = 1e-3  # what of an update may be lost unsaid


@dataclass(frozen=True)
class Fitted:
    """down (rank, in), up (out, rank), and the part of the update that is lost: ‖lost‖ / ‖delta W‖ (Frobenius)."""

    down: Tensor
    up: Tensor
    lost: float


def fit(update: LowRank, start: Tensor, scale: float) -> Fitted:
    """The update as down and up of another rank and scale: scale·up·down is its delta W, all fp32.

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
class StartLora:
    """Updates that a run begins from, by native module name, of layers that it trains."""

    modules: Mapping[str, Parts]

    @torch.no_grad()
    def put_on(self, adapters: Mapping[str, Adapter]) -> list[str]:
        """Fills the adapters' masters; what of the LoRA is lost by a lower rank comes back as a sentence."""
        lost = {}
        for name, parts in self.modules.items():
            adapter = adapters[name]
            update = low_rank(parts)
            if isinstance(adapter, LoraAdapter) and update is not None:
                fitted = fit(update, adapter.down.cpu(), adapter.scale)
                adapter.down.copy_(fitted.down)
                adapter.up.copy_(fitted.up)
                if update.rank > len(adapter.down):
                    lost[name] = fitted.lost
                continue
            if isinstance(adapter, LoraAdapter) and _algorithm(parts) in DENSE:
                full = delta_of(parts, adapter.down.device)
                down, up, left_out = cut_to_rank(full, len(adapter.down), adapter.scale, generator(0, "start", name))
                adapter.down[: len(down)].copy_(down)
                adapter.up[:, : len(down)].copy_(up)
                if left_out > NOTICEABLE:
                    lost[name] = left_out
                continue
            adapter.load(parts)
        if not lost:
            return []
        worst = max(lost, key=lambda name: lost[name])
        mean = sum(lost.values()) / len(lost)
        return [
            f"start_from has a higher rank than the network in {len(lost)} layers; of their update {mean:.1%} is left "
            f"out (most in {worst}: {lost[worst]:.1%}). Raise rank to keep it whole."
        ]


def read_start(
    options: NetworkOptions, family: Family, model: Any, targets: Sequence[str]
) -> tuple[StartLora | None, list[str]]:
    """(what the run begins from, what a user should know of it); needs no weights of the model.

    Raises ValueError where the LoRA is of another model or of another algorithm than the network.
    """
    if options.start_from is None:
        return None, []
    name, shapes = options.start_from.name, linear_shapes(model)
    try:
        found = read_lora(options.start_from.tensors(), family, model)
    except DoesNotFit as error:
        raise ValueError(
            f"start_from: {name} does not fit this model ({error}); choose a LoRA that was trained on this model."
        ) from error
    if not found.modules and found.others:
        raise ValueError(
            f"start_from: {name} changes {_some(found.others)} in a way that no adapter here begins from; choose a "
            "LoRA, LoHa, LoKr, DoRA or OFT, or put it on the MODEL with a LoRA loader."
        )
    if not found.modules:
        raise ValueError(
            f"start_from: {name} has no update for a layer of {family.title}; choose a LoRA that was trained on this "
            "model."
        )
    specs = adapter_specs(options, targets)
    for layer, parts in found.modules.items():
        if layer not in specs:
            continue  # it is left out, which is said below
        algorithm = _algorithm(parts)
        if algorithm != options.algorithm and not (options.algorithm == "lora" and algorithm in DENSE):
            raise ValueError(
                f"start_from: {name} is a {algorithm} ({layer} has {', '.join(sorted(parts))}) and the network trains "
                f"{options.algorithm}; set algorithm to {algorithm}, or choose another LoRA."
            )
        if not all(tensor.isfinite().all() for tensor in parts.values()):
            raise ValueError(
                f"start_from: {name} holds NaN or infinite values ({layer}); choose an earlier save of it."
            )
        if (wrong := _misfit(specs[layer], parts, *shapes[layer])) is not None:
            raise ValueError(
                f"start_from: {name} does not fit this model and network ({layer}: {wrong}); choose a LoRA of this "
                "model, or set rank and alpha as it was trained with."
            )
    taken = {layer: parts for layer, parts in found.modules.items() if layer in specs}
    if not taken:
        raise ValueError(
            f"start_from: {name} has updates only for layers that are not trained ({_some(list(found.modules))}); add "
            "them to targets."
        )
    return StartLora(taken), list(_start_notes(found, taken, targets))


def _start_notes(found: ReadLora, taken: Mapping[str, Parts], targets: Sequence[str]) -> Iterator[str]:
    left = [layer for layer in found.modules if layer not in taken]
    if left:
        yield (
            f"start_from also has updates for {len(left)} layers that are not trained, which are left out: "
            f"{_some(left)}. Add them to targets to keep them."
        )
    if found.others:
        yield f"start_from also changes weights that no adapter holds, which are left out: {_some(found.others)}."
    if found.text_encoder:
        yield f"start_from also has {found.text_encoder} keys for the text encoder, which are left out."
    if found.unknown:
        yield f"start_from has keys of no layer of this model, which are left out: {_some(found.unknown)}."
    if anew := [layer for layer in targets if layer not in taken]:
        yield f"{len(anew)} of the {len(targets)} trained layers are not in start_from and begin anew: {_some(anew)}."


def _algorithm(parts: Parts) -> str:
    marks = {"oft_blocks": "oft", "hada_w1_a": "loha", "lokr_w1": "lokr", "lokr_w1_a": "lokr", DORA: "dora"}
    return next((algorithm for mark, algorithm in marks.items() if mark in parts), "lora")


def _misfit(spec: AdapterSpec, parts: Parts, rows: int, columns: int) -> str | None:
    """What of the tensors does not suit a layer (rows, columns) and its adapter; None where all does."""
    if spec.algorithm == "lora":
        update = low_rank(parts)
        there = size_of(parts) if update is None else (len(update.up), update.down.shape[1])
        if there is None:
            return f"it has {', '.join(sorted(parts))}"
        return None if there == (rows, columns) else f"{there[0]} x {there[1]} there, {rows} x {columns} here"
    with torch.device("meta"):
        adapter = ADAPTERS[spec.algorithm](spec, rows, columns)
    own = adapter.tensors()
    if {"lokr_w1", "lokr_w2"} <= parts.keys():
        own.pop(ALPHA, None)  # no reader uses it where both are whole
        parts = {suffix: tensor for suffix, tensor in parts.items() if suffix != ALPHA}
    if own.keys() != parts.keys():
        return f"{', '.join(sorted(parts))} there, {', '.join(sorted(own))} here"
    for suffix, tensor in own.items():
        if suffix == ALPHA:
            if float(parts[ALPHA]) != float(tensor):
                return f"alpha {float(parts[ALPHA]):g} there, {float(tensor):g} here"
        elif tensor.shape != parts[suffix].shape:
            return f"{suffix} {tuple(parts[suffix].shape)} there, {tuple(tensor.shape)} here"
    return None


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

"""ComfyUI's weight patches: the kind of each, the weights that it fits, and its effect on one.

ComfyUI's reader (`comfy.lora`, `comfy.weight_adapter`) leaves a weight as it is where a patch does not suit it, and
only logs that; here it is found before, on weights without numbers, and said.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.lora
import comfy.weight_adapter
import torch
from comfy.weight_adapter.boft import BOFTAdapter
from comfy.weight_adapter.glora import GLoRAAdapter
from comfy.weight_adapter.loha import LoHaAdapter
from comfy.weight_adapter.lokr import LoKrAdapter
from comfy.weight_adapter.lora import LoRAAdapter
from comfy.weight_adapter.oft import OFTAdapter
from torch import Tensor

from ...models.adapters.pissa import largest_parts
from .lora_model import ALPHA, DORA, DOWN, UP

Place = tuple[int, int, int]
Change = Callable[[Tensor], Tensor]
Target = str | tuple[Any, ...]
"""A weight of the model, or (weight, its place or None, function or absent) for a part of one."""

RESHAPE = "reshape_weight"
EMPTY = 1e-6  # a singular part this small beside the largest is none
_ROUNDING = 1e-6  # a change of W this small beside W is what fp32 rounds
# What ComfyUI's adapters hold in `weights`, in their order, by the suffixes of kohya's and LyCORIS' files.
_TURNS = ("oft_blocks", "rescale", ALPHA, DORA)
_ORDERS: dict[type, tuple[str, ...]] = {
    LoRAAdapter: (UP, DOWN, ALPHA, "lora_mid.weight", DORA, RESHAPE),
    LoHaAdapter: ("hada_w1_a", "hada_w1_b", ALPHA, "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", DORA),
    LoKrAdapter: ("lokr_w1", "lokr_w2", ALPHA, "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", "lokr_t2", DORA),
    GLoRAAdapter: ("a1.weight", "a2.weight", "b1.weight", "b2.weight", ALPHA, DORA),
    OFTAdapter: _TURNS,
    BOFTAdapter: _TURNS,
}
_PLAIN = {"diff": "full difference", "set": "full weight"}
_NO_MATRICES = {ALPHA, DORA, RESHAPE, "rescale"}


class DoesNotFit(ValueError):
    """An update does not fit the layer that it is named for; the text says which, and why."""


@dataclass(frozen=True)
class Patch:
    """One entry of ComfyUI's weight patches.

    content: an adapter of ComfyUI's, or (kind, tensors).
    place: (axis, start, length) of the part of the weight that it is for; None for all of it.
    function: applied to the update before it is added.
    """

    content: Any
    place: Place | None = None
    function: Change | None = None

    @classmethod
    def of(cls, target: Target, content: Any) -> tuple[str, "Patch"]:
        """Make (the weight's key, the patch) of an entry of ComfyUI's reader."""
        if isinstance(target, str):
            return target, cls(content)
        key, place, *function = target
        return key, cls(content, place, function[0] if function else None)

    @property
    def is_complete(self) -> bool:
        """True for a patch of the complete weight without a function."""
        return self.place is None and self.function is None

    @property
    def kind(self) -> str:
        """Its algorithm's name, as the network's options have it where there is one."""
        if isinstance(self.content, tuple):
            return _PLAIN.get(self.content[0], str(self.content[0]))
        return "dora" if {DORA, DOWN} <= self.tensors().keys() else str(self.content.name)

    @property
    def form(self) -> str:
        """`kind`, with what the network's own adapter of that kind has not."""
        named = self.tensors()
        lengths = named.get(DORA)
        more = {
            "with a middle": "lora_mid.weight" in named,
            "with cores": bool({"hada_t1", "lokr_t2"} & named.keys()),
            "with dora_scale": lengths is not None and self.kind != "dora",
            "by rows": lengths is not None and lengths.dim() == 2 and len(lengths) > 1 and self.kind == "dora",
        }
        return " ".join([self.kind, *(text for text, there in more.items() if there)])

    @property
    def needs_weight(self) -> bool:
        """True where delta W depends on W."""
        if isinstance(self.content, tuple):
            return bool(self.content[0] == "set")
        return isinstance(self.content, GLoRAAdapter | OFTAdapter | BOFTAdapter) or DORA in self.tensors()

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by the suffix that they have in kohya's and LyCORIS' files; no copies."""
        if isinstance(self.content, tuple):
            return {"diff" if self.content[0] == "diff" else "set_weight": self.content[1][0]}
        named = zip(_ORDERS[type(self.content)], self.content.weights, strict=False)
        return {suffix: torch.as_tensor(value).detach() for suffix, value in named if value is not None}

    def check_known(self, name: str) -> None:
        """Raise DoesNotFit for content that this pack cannot read: of an adapter or with settings that ComfyUI has
        added since, or of tensors that are no matrices. name: of the weight, for the message."""
        if (unknown := _unknown(self.content)) is not None:
            raise DoesNotFit(f"{name}: ComfyUI reads it as {unknown}, which this version of Tessera does not know")
        if isinstance(self.content, tuple):
            return
        for suffix, tensor in self.tensors().items():
            if tensor.dim() < 2 and suffix not in _NO_MATRICES or (suffix == RESHAPE and tensor.dim() != 1):
                raise DoesNotFit(f"{name}: {suffix} is of the shape {tuple(tensor.shape)}, which is no matrix")

    def shape(self) -> tuple[int, int] | None:
        """(out, in) of what it is for, 0 for a side that it does not tell; None where it tells neither."""
        named = self.tensors()
        if (whole := named.get("diff", named.get("set_weight"))) is not None:
            return (len(whole), whole.shape[1]) if whole.dim() == 2 else None
        if {UP, DOWN} <= named.keys() and RESHAPE not in named:
            return len(named[UP]), named[DOWN].flatten(1).shape[1]
        if "oft_blocks" in named:
            return named["oft_blocks"].shape[-3] * named["oft_blocks"].shape[-1], 0
        return _size(named)

    def check(self, layer: str, shape: Sequence[int]) -> None:
        """Raise DoesNotFit where ComfyUI's reader would leave a weight of this shape unchanged. layer: for the
        message."""
        if self.place is not None:
            axis, _, length = self.place
            shape = (*shape[:axis], length, *shape[axis + 1 :])
        there, here = self.shape(), _text(shape)
        if there is not None and len(shape) == 2 and any(a and a != b for a, b in zip(there, shape, strict=True)):
            rows, columns = (str(side or "any") for side in there)
            raise DoesNotFit(f"{layer}: {rows} x {columns} there, {here} here")
        named = self.tensors()
        if RESHAPE in named and (wanted := named[RESHAPE].tolist()) != list(shape):
            raise DoesNotFit(f"{layer}: it makes a layer of {_text(wanted)} of one of {here}, as control LoRAs do")
        if isinstance(self.content, BOFTAdapter) and ALPHA not in named:
            raise DoesNotFit(f"{layer}: a boft without alpha, which ComfyUI does not apply")
        if not _applies(self.content, shape) or not _lengths_fit(named.get(DORA), shape):
            held = ", ".join(f"{suffix} {_text(t.shape)}" for suffix, t in sorted(named.items()) if t.dim())
            raise DoesNotFit(f"{layer}: ComfyUI cannot apply it to {here} ({held})")

    def apply(self, weight: Tensor) -> tuple[Tensor, bool]:
        """Apply the patch at strength 1 by ComfyUI's own reader; returns the weight and whether it was changed. weight:
        the complete one, fp32, which is written to."""
        used = isinstance(self.content, tuple) and self.content[0] == "set"

        def seen(update: Tensor) -> Tensor:
            nonlocal used
            used = True
            return update if self.function is None else self.function(update)

        return comfy.lora.calculate_weight([(1.0, self.content, 1.0, self.place, seen)], weight, ""), used


def _unknown(content: Any) -> str | None:
    """A name for content that is none of `_ORDERS` and `_PLAIN`, or has more to it than they do; None for the rest."""
    if isinstance(content, tuple):
        if len(content) != 2 or content[0] not in tuple(_PLAIN):
            return "a patch of another kind"
        kind, values = content
        plain = len(values) == 1 and isinstance(values[0], Tensor)
        return None if plain else f"a {_PLAIN[kind]} with settings"
    name, order = type(content).__name__, _ORDERS.get(type(content))
    if order is None:
        return f"a {name}"
    if getattr(content, "row_offset", None) is not None:
        return f"a {name} of some rows of a wider layer"
    values = content.weights
    known = all(value is None or isinstance(value, Tensor | int | float | list) for value in values[: len(order)])
    more = [value for value in values[len(order) :] if value is not None]
    return None if known and not more and len(values) >= len(order) else f"a {name} with settings"


def _applies(content: Any, shape: Sequence[int]) -> bool:
    """True where ComfyUI's reader changes a weight of this shape; tried on meta tensors."""
    if isinstance(content, OFTAdapter | BOFTAdapter):
        # A limit is compared with numbers; whatever it is, the shapes are the same.
        blocks, rescale, alpha, *more = content.weights
        content = type(content)(set(), (blocks, rescale, None if alpha is None else 0.0, *more))
    try:
        return Patch(content).apply(torch.empty(tuple(shape), device="meta"))[1]
    except Exception:
        return False


def _lengths_fit(lengths: Tensor | None, shape: Sequence[int]) -> bool:
    """True where a dora_scale is one number for each row or each column of a weight, as the reader divides by them."""
    if lengths is None:
        return True
    if lengths.dim() == 0 or len(shape) != 2:
        return False
    divided_by = (shape[0], 1) if len(lengths) == shape[0] else (1, shape[1])
    try:
        return torch.broadcast_shapes(lengths.shape, divided_by, tuple(shape)) == tuple(shape)
    except RuntimeError:
        return False


def _size(named: Mapping[str, Tensor]) -> tuple[int, int] | None:
    """(out, in) of a LoHa or LoKr of matrices; None for another layout."""
    plain = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", ALPHA, DORA}
    plain |= {f"lokr_{w}{part}" for w in ("w1", "w2") for part in ("", "_a", "_b")}
    matrices = {suffix: tensor for suffix, tensor in named.items() if suffix not in (ALPHA, DORA)}
    if not named.keys() <= plain or any(tensor.dim() != 2 for tensor in matrices.values()):
        return None
    if "hada_w1_a" in named:
        return len(named["hada_w1_a"]), named["hada_w1_b"].shape[1]
    rows, columns = 1, 1
    for w in ("lokr_w1", "lokr_w2"):
        first, last = (named.get(w, named.get(f"{w}{part}")) for part in ("_a", "_b"))
        if first is None or last is None:
            return None
        rows, columns = rows * len(first), columns * last.shape[1]
    return rows, columns


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def delta_of(
    patches: Sequence[Patch], shape: Sequence[int], device: torch.device, read: Callable[[], Tensor]
) -> Tensor:
    """Compute delta W, of this shape, fp32 on `device`: the weight as ComfyUI's reader patches it, less the weight.

    read: gives W, fp32, which is only asked for where delta W depends on it (BOFT, OFT, GLoRA, DoRA's lengths, a whole
    weight); else the patches go on zeros, so that nothing is rounded to W's size. Raises ValueError where the reader
    leaves a patch out, and where the numbers overflow.
    """
    weight = read().to(device) if any(patch.needs_weight for patch in patches) else None
    delta = torch.zeros(*shape, device=device) if weight is None else weight.clone()
    for patch in patches:
        delta, applied = patch.apply(delta)
        if not applied:
            raise ValueError(f"ComfyUI could not apply its {patch.form}; ComfyUI's log says why")
    if weight is not None:
        delta -= weight
        if delta.norm() <= _ROUNDING * weight.norm():
            delta.zero_()
    if not delta.isfinite().all():
        raise ValueError("its update is NaN or infinite on the weights of this model")
    return delta


def truncate_to_rank(delta: Tensor, rank: int, scale: float, source: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """Truncate delta W by SVD to (down, up, ‖lost‖ / ‖delta W‖): scale·up·down are its `rank` largest singular parts,
    or as many as there are."""
    left, sizes, right = largest_parts(delta, rank, source)
    there = int((sizes > EMPTY * sizes[0]).sum())
    left, sizes, right = left[:, :there], sizes[:there], right[:there]
    root = (sizes / scale).sqrt()
    total = float(delta.double().square().sum())
    lost = math.sqrt(max(0.0, 1.0 - float(sizes.double().square().sum()) / total)) if total else 0.0
    return right * root[:, None], left * root, lost

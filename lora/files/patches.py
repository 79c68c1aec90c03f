"""ComfyUI's weight patches: the kind of each, the weights that it fits, and its effect on a weight.

ComfyUI's reader (`comfy.lora`, `comfy.weight_adapter`) leaves a weight unchanged if a patch does not fit it, and only
logs that. Here the mismatch is detected beforehand, on meta tensors, and raised.
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
from ...models.adapters.registry import ADAPTERS, algorithm_of_file
from .spellings import ALPHA, DORA, DOWN, UP

Place = tuple[int, int, int]
Change = Callable[[Tensor], Tensor]
Target = str | tuple[Any, ...]
"""The key of a weight, or (key, place or None, optional function) for a part of one."""

RESHAPE = "reshape_weight"
EMPTY = 1e-6  # singular values below this fraction of the largest count as zero
_ROUNDING = 1e-6  # a change of W below this fraction of W is fp32 rounding
# Entries of `weights` in ComfyUI's adapters, in order, by their suffix in kohya's and LyCORIS' files.
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
# Suffixes of the tensors of a LoHa and a LoKr of matrices.
_LOHA = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}
_LOKR = {f"lokr_{factor}{part}" for factor in ("w1", "w2") for part in ("", "_a", "_b")}
_NO_MATRICES = {ALPHA, DORA, RESHAPE, "rescale"}


class DoesNotFit(ValueError):
    """Raised if an update does not fit the layer that it is named for; the message gives the layer and the cause."""


@dataclass(frozen=True)
class Patch:
    """One entry of ComfyUI's weight patches.

    content: an adapter of ComfyUI's, or (kind, tensors).
    place: (axis, start, length) of the slice of the weight that it changes; None for all of it.
    function: applied to the update before it is added.
    """

    content: Any
    place: Place | None = None
    function: Change | None = None

    @classmethod
    def from_entry(cls, target: Target, content: Any) -> tuple[str, "Patch"]:
        """Return (the weight's key, the patch) for an entry of ComfyUI's reader."""
        if isinstance(target, str):
            return target, cls(content)
        key, place, *function = target
        return key, cls(content, place, function[0] if function else None)

    @property
    def is_complete(self) -> bool:
        """Return whether it patches the complete weight, without a function."""
        return self.place is None and self.function is None

    @property
    def kind(self) -> str:
        """Name of its algorithm, as in the network's options if they have it."""
        if isinstance(self.content, tuple):
            return _PLAIN.get(self.content[0], str(self.content[0]))
        return algorithm_of_file(str(self.content.name), self.tensors().keys())

    @property
    def form(self) -> str:
        """`kind`, with the features that the network's own adapter of that kind lacks."""
        tensors = self.tensors()
        lengths = tensors.get(DORA)
        has_lengths = self.kind in ADAPTERS and ADAPTERS[self.kind].has_lengths
        features = {
            "with a middle": "lora_mid.weight" in tensors,
            "with cores": bool({"hada_t1", "lokr_t2"} & tensors.keys()),
            "with dora_scale": lengths is not None and not has_lengths,
            "by rows": lengths is not None and lengths.dim() == 2 and len(lengths) > 1 and has_lengths,
        }
        return " ".join([self.kind, *(text for text, present in features.items() if present)])

    @property
    def needs_weight(self) -> bool:
        """Return whether delta W depends on W."""
        if isinstance(self.content, tuple):
            return bool(self.content[0] == "set")
        return isinstance(self.content, GLoRAAdapter | OFTAdapter | BOFTAdapter) or DORA in self.tensors()

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by their suffix in kohya's and LyCORIS' files, without copies."""
        if isinstance(self.content, tuple):
            return {"diff" if self.content[0] == "diff" else "set_weight": self.content[1][0]}
        pairs = zip(_ORDERS[type(self.content)], self.content.weights, strict=False)
        return {suffix: torch.as_tensor(value).detach() for suffix, value in pairs if value is not None}

    def check_known(self, name: str) -> None:
        """Raise DoesNotFit for content that this pack cannot read: an adapter or settings that ComfyUI has added since,
        or tensors that are not matrices. name: of the weight, for the message."""
        if (unknown := _unknown(self.content)) is not None:
            raise DoesNotFit(f"{name}: ComfyUI reads it as {unknown}, which this version of Tessera does not know")
        if isinstance(self.content, tuple):
            return
        for suffix, tensor in self.tensors().items():
            is_usual = tensor.dim() == 1 if suffix == RESHAPE else tensor.dim() >= 2 or suffix in _NO_MATRICES
            if not is_usual:
                raise DoesNotFit(f"{name}: {suffix} is of the shape {tuple(tensor.shape)}, which is no matrix")

    def shape(self) -> tuple[int, int] | None:
        """Return (out, in) of the weight that it fits, 0 for a side left open; None if both are open."""
        tensors = self.tensors()
        if (whole := tensors.get("diff", tensors.get("set_weight"))) is not None:
            return (len(whole), whole.shape[1]) if whole.dim() == 2 else None
        if {UP, DOWN} <= tensors.keys() and RESHAPE not in tensors:
            return len(tensors[UP]), tensors[DOWN].flatten(1).shape[1]
        if "oft_blocks" in tensors:
            return tensors["oft_blocks"].shape[-3] * tensors["oft_blocks"].shape[-1], 0
        return _size(tensors)

    def check(self, layer: str, shape: Sequence[int]) -> None:
        """Raise DoesNotFit if ComfyUI's reader would leave a weight of this shape unchanged. layer: for the message."""
        if self.place is not None:
            axis, _, length = self.place
            shape = (*shape[:axis], length, *shape[axis + 1 :])
        text = _text(shape)
        sides = self.shape()
        if sides is not None and not _sides_fit(sides, shape):
            rows, columns = (str(side or "any") for side in sides)
            raise DoesNotFit(f"{layer}: {rows} x {columns} there, {text} here")
        tensors = self.tensors()
        new_shape = tensors[RESHAPE].tolist() if RESHAPE in tensors else list(shape)
        if new_shape != list(shape):
            raise DoesNotFit(f"{layer}: it makes a layer of {_text(new_shape)} of one of {text}, as control LoRAs do")
        if isinstance(self.content, BOFTAdapter) and ALPHA not in tensors:
            raise DoesNotFit(f"{layer}: a boft without alpha, which ComfyUI does not apply")
        if not _applies(self.content, shape) or not _lengths_fit(tensors.get(DORA), shape):
            listing = ", ".join(f"{suffix} {_text(t.shape)}" for suffix, t in sorted(tensors.items()) if t.dim())
            raise DoesNotFit(f"{layer}: ComfyUI cannot apply it to {text} ({listing})")

    def apply(self, weight: Tensor) -> tuple[Tensor, bool]:
        """Apply the patch at strength 1 with ComfyUI's own reader; returns the weight and whether it was changed.
        weight: the complete one, fp32, modified in place."""
        used = isinstance(self.content, tuple) and self.content[0] == "set"

        def record_use(update: Tensor) -> Tensor:
            nonlocal used
            used = True
            return update if self.function is None else self.function(update)

        return comfy.lora.calculate_weight([(1.0, self.content, 1.0, self.place, record_use)], weight, ""), used


def _sides_fit(sides: tuple[int, int], shape: Sequence[int]) -> bool:
    """Return whether (out, in), 0 for a side left open, is the shape of a matrix; of anything else it says nothing."""
    return len(shape) != 2 or all(side in (0, length) for side, length in zip(sides, shape, strict=True))


def _unknown_plain(content: tuple[Any, ...]) -> str | None:
    """Return a name for a patch without an adapter that is not a whole difference or weight; None for these."""
    if len(content) != 2 or content[0] not in tuple(_PLAIN):
        return "a patch of another kind"
    kind, values = content
    is_whole = len(values) == 1 and isinstance(values[0], Tensor)
    return None if is_whole else f"a {_PLAIN[kind]} with settings"


def _unknown(content: Any) -> str | None:
    """Return a name for content that is not in `_ORDERS` or `_PLAIN`, or has settings beyond theirs; None otherwise."""
    if isinstance(content, tuple):
        return _unknown_plain(content)
    name, order = type(content).__name__, _ORDERS.get(type(content))
    if order is None:
        return f"a {name}"
    if getattr(content, "row_offset", None) is not None:
        return f"a {name} of some rows of a wider layer"
    values = content.weights
    types_match = all(value is None or isinstance(value, Tensor | int | float | list) for value in values[: len(order)])
    extra = [value for value in values[len(order) :] if value is not None]
    return None if types_match and not extra and len(values) >= len(order) else f"a {name} with settings"


def _applies(content: Any, shape: Sequence[int]) -> bool:
    """Return whether ComfyUI's reader changes a weight of this shape; tried on meta tensors."""
    if isinstance(content, OFTAdapter | BOFTAdapter):
        # The constraint (alpha) is compared with values, which meta tensors lack; it does not affect the shapes.
        blocks, rescale, alpha, *rest = content.weights
        content = type(content)(set(), (blocks, rescale, None if alpha is None else 0.0, *rest))
    try:
        return Patch(content).apply(torch.empty(tuple(shape), device="meta"))[1]
    except Exception:
        return False


def _lengths_fit(lengths: Tensor | None, shape: Sequence[int]) -> bool:
    """Return whether a dora_scale has one number per row or per column of a weight, as the reader divides by it."""
    if lengths is None:
        return True
    if lengths.dim() == 0 or len(shape) != 2:
        return False
    divided_by = (shape[0], 1) if len(lengths) == shape[0] else (1, shape[1])
    try:
        return torch.broadcast_shapes(lengths.shape, divided_by, tuple(shape)) == tuple(shape)
    except RuntimeError:
        return False


def _size(tensors: Mapping[str, Tensor]) -> tuple[int, int] | None:
    """Return (out, in) of a LoHa or LoKr of matrices; None for another layout."""
    suffixes = tensors.keys() - {ALPHA, DORA}
    if not suffixes <= _LOHA | _LOKR:
        return None
    if any(tensors[suffix].dim() != 2 for suffix in suffixes):
        return None
    if "hada_w1_a" in tensors:
        return len(tensors["hada_w1_a"]), tensors["hada_w1_b"].shape[1]
    outer, inner = _factor_size(tensors, "lokr_w1"), _factor_size(tensors, "lokr_w2")
    if outer is None or inner is None:
        return None
    return outer[0] * inner[0], outer[1] * inner[1]


def _factor_size(tensors: Mapping[str, Tensor], name: str) -> tuple[int, int] | None:
    """Return (rows, columns) of a factor of a LoKr, whole or as a product of two matrices; None if it is not there."""
    first, last = (tensors.get(name, tensors.get(f"{name}{part}")) for part in ("_a", "_b"))
    return None if first is None or last is None else (len(first), last.shape[1])


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def delta_of(
    patches: Sequence[Patch], shape: Sequence[int], device: torch.device, read: Callable[[], Tensor]
) -> Tensor:
    """Compute delta W, of this shape, fp32 on `device`: the weight patched by ComfyUI's reader, minus the weight.

    read: returns W, fp32; called only if delta W depends on it (BOFT, OFT, GLoRA, DoRA's lengths, a whole weight).
        Otherwise the patches are applied to zeros, so that nothing is rounded to W's magnitude. Raises ValueError if
        the reader skips a patch, or if the values overflow.
    """
    weight = read().to(device) if any(patch.needs_weight for patch in patches) else None
    delta = torch.zeros(tuple(shape), device=device) if weight is None else weight.clone()
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
    """Truncate delta W by SVD to (down, up, ‖lost‖ / ‖delta W‖): scale·up·down is the sum of its r largest singular
    components, `rank` of them or as many as there are.

    delta: (out, in) → down (r, in), up (out, r).
    """
    u, singular_values, vh = largest_parts(delta, rank, source)
    effective_rank = int((singular_values > EMPTY * singular_values[0]).sum())
    u = u[:, :effective_rank]
    singular_values = singular_values[:effective_rank]
    vh = vh[:effective_rank]
    root = (singular_values / scale).sqrt()
    total = float(delta.double().square().sum())
    loss = math.sqrt(max(0.0, 1.0 - float(singular_values.double().square().sum()) / total)) if total else 0.0
    return vh * root[:, None], u * root, loss

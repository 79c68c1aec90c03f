"""Re-expression of 16 and 32 bit weights of a state dict in 8 bit, in the formats that ComfyUI's own loader reads.

int8 has a scale for each row of a weight that is turned first by a Hadamard matrix along its columns, which spreads the
few large ones (ConvRot); fp8 has one scale for a weight, as ComfyUI's layout of it does.
"""

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor
from torch import Tensor

from ...common.core import quantised_data, quantised_params
from ...common.text import shortlist
from .products import FP8, INT8

AS_STORED = "as stored"
BASES = (AS_STORED, INT8, FP8)
WIDE = (torch.float32, torch.bfloat16, torch.float16)
TURNS = (256, 64, 16)
"""Sizes of the Hadamard matrix, of which the first that divides the columns is taken."""
SLICE = 1 << 22
"""Elements of a weight that are quantised at once."""


_KEY = "tessera.base"


def remember_base(patcher: ModelPatcher, base: str) -> None:
    """Note on a MODEL, for its clones too, that its loader has put it into `base`."""
    patcher.set_attachments(_KEY, base)


def base_of(patcher: ModelPatcher) -> str:
    """Return the base that the MODEL's loader has put it into, AS_STORED where it has not."""
    return patcher.get_attachment(_KEY) or AS_STORED


@dataclass
class Requantised:
    """Weights that were put into 8 bit.

    count, unturned: numbers of weights in 8 bit, and of those of int8 that no Hadamard matrix fits.
    before, after: bytes of the weights that are in 8 bit now.
    left: names of weights that stay as they are, by reason.
    """

    count: int = 0
    unturned: int = 0
    before: int = 0
    after: int = 0
    left: dict[str, list[str]] = field(default_factory=dict)

    def notes(self, base: str, took: str = "") -> Iterator[str]:
        """Yield sentences for the user. took: how long it took, in words."""
        gain = f"{self.before / 2**30:.2f} GiB became {self.after / 2**30:.2f} GiB"
        if self.count:
            yield f"base: {self.count} layers of the blocks were converted to {base}{took}; {gain}."
        else:
            yield f"base is '{base}', but no layer was converted."
        if self.unturned:
            yield f"base: {self.unturned} of them have a width that isn't a multiple of 16, where int8 is less exact."
        for reason, layers in self.left.items():
            yield f"base: {shortlist(layers)} stayed as stored: {reason}."


def requantise(
    tensors: dict[str, Tensor],
    names: Collection[str],
    base: str,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> Requantised:
    """Put weights of a state dict into 8 bit, in place, one at a time.

    tensors: the state dict; a weight that is replaced leaves it, and is freed where nothing else holds it.
    names: keys of the weights, (out, in) each. Those that are in 8 bit or less already stay.
    base: one of BASES but the first.
    device: computes them; the results are on the host.
    progress(done, of): called before each.
    """
    result = Requantised()
    for done, name in enumerate(names):
        progress(done, len(names))
        weight, module = tensors[name], name.removesuffix(".weight")
        if weight.dtype not in WIDE or f"{module}.comfy_quant" in tensors:
            result.left.setdefault("already in 8 bit or less", []).append(module)
            continue
        held = quantised(weight, base, device, torch.device("cpu"))
        if held is None:
            result.left.setdefault("all zero, or not finite", []).append(module)
            continue
        described = _describe(base, weight.shape[1])
        result.count += 1
        result.unturned += base == INT8 and "convrot" not in described
        result.before += weight.nbytes
        text = torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)
        parts = held.state_dict(name)
        result.after += sum(tensor.nbytes for tensor in parts.values())
        tensors |= parts | {f"{module}.comfy_quant": text}
        del weight, held
    progress(len(names), len(names))
    return result


def largest(weight: Tensor) -> Tensor:
    """Largest absolute value, an fp32 scalar, without a copy of the weight; NaN where it has one."""
    low, high = weight.aminmax()
    return torch.maximum(-low, high).float()


def quantised_zeros(shape: tuple[int, int], base: str, home: torch.device) -> QuantizedTensor:
    """Make a weight of zeros in the form that `quantised` gives; on the host its codes take no memory before they are
    written."""
    layout, options = _layout(base, shape[1])
    kind = QuantizedTensor.from_float(torch.zeros(1, shape[1]), layout, **options)
    codes, params = quantised_data(kind), quantised_params(kind)
    data = torch.from_numpy(np.zeros((shape[0], *codes.shape[1:]), np.uint8)).view(codes.dtype)
    scale = torch.ones(shape[0], 1) if params.scale.ndim else torch.ones(())
    params = replace(params, scale=scale.to(home), orig_shape=shape)
    return QuantizedTensor(data.to(home), layout, params)


def _layout(base: str, columns: int, most: Tensor | None = None) -> tuple[str, dict[str, Any]]:
    """Return the name of ComfyUI's layout for a weight, and the options with which it quantises.

    most: largest absolute value of the weight.
    """
    if base == FP8:
        most = torch.ones(()) if most is None else most
        return "TensorCoreFP8E4M3Layout", {"scale": most / torch.finfo(torch.float8_e4m3fn).max}
    described = _describe(base, columns)
    del described["format"]
    return "TensorWiseINT8Layout", {"per_channel": True, **described}


def _describe(base: str, columns: int) -> dict[str, Any]:
    """ComfyUI's description of a weight in such a format, `comfy_quant` of a file."""
    if base == FP8:
        # Without it core would multiply in fp8 where a card can, with x cast without a scale.
        return {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}
    turn = next((size for size in TURNS if columns % size == 0), None)
    turned = {} if turn is None else {"convrot": True, "convrot_groupsize": turn}
    return {"format": "int8_tensorwise", **turned}


def quantised(weight: Tensor, base: str, device: torch.device, home: torch.device) -> QuantizedTensor | None:
    """Quantise one weight (out, in), some rows at a time, so that little is held in fp32.

    base: one of BASES but the first.
    device: computes it.
    home: where the result is to lie.

    Returns ComfyUI's own tensor; None for a weight that is all zero, or not finite.
    """
    most = largest(weight)
    if not (torch.isfinite(most) and most > 0):
        return None
    layout, options = _layout(base, weight.shape[1], most.to(device))
    codes: Tensor | None = None
    scales: list[Tensor] = []
    rows = max(1, SLICE // weight.shape[1])
    for start in range(0, len(weight), rows):
        # In fp32: a bf16 weight would be turned in bf16, and be rounded before it is quantised.
        part = QuantizedTensor.from_float(weight[start : start + rows].to(device).float(), layout, **options)
        data, params = quantised_data(part), quantised_params(part)
        if codes is None:
            codes = torch.empty(len(weight), *data.shape[1:], dtype=data.dtype, device=home)
        codes[start : start + rows] = data
        scales.append(params.scale.to(home))
    scale = torch.cat(scales) if scales[0].ndim else scales[0]
    params = replace(params, scale=scale, orig_dtype=weight.dtype, orig_shape=tuple(weight.shape))
    return QuantizedTensor(codes, layout, params)

"""Quantise 16 and 32 bit weights of a state dict to 8 bit, in the formats that ComfyUI's own loader reads.

int8 has one scale per row of a weight that is first rotated by a Hadamard matrix along its columns, which spreads
outliers (ConvRot); fp8 has one scale per weight, as in ComfyUI's layout.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor
from torch import Tensor

from ...common.core import quantised_data, quantised_params
from ...common.text import quantity, shortlist
from .matmul import FP8, INT8

AS_STORED = "as stored"
QUANTIZE = (AS_STORED, INT8, FP8)
WIDE = (torch.float32, torch.bfloat16, torch.float16)
HADAMARD_SIZES = (256, 64, 16)
"""Sizes of the Hadamard matrix; the first that divides the columns is used."""
SLICE = 1 << 22
"""Elements of a weight quantised at once."""


_KEY = "tessera.quantize"


def remember_quantize(patcher: ModelPatcher, quantize: str) -> None:
    """Record on a MODEL and its clones that its loader has quantised it to this format."""
    patcher.set_attachments(_KEY, quantize)


def quantize_of(patcher: ModelPatcher) -> str:
    """Return the format that the MODEL's loader has quantised it to, AS_STORED if it has not."""
    return patcher.get_attachment(_KEY) or AS_STORED


@dataclass
class QuantizeResult:
    """Statistics of weights quantised to 8 bit.

    count: number of weights quantised.
    unrotated: number of int8 ones whose width no Hadamard matrix divides.
    bytes_before: bytes of the quantised weights before.
    bytes_after: bytes of the quantised weights after.
    skipped: names of weights that are unchanged, by reason.
    """

    count: int = 0
    unrotated: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def count_quantized(self, bytes_before: int, bytes_after: int, is_unrotated: bool) -> None:
        """Count a quantised weight. is_unrotated: it is int8, of a width that no Hadamard matrix divides."""
        self.count += 1
        self.unrotated += is_unrotated
        self.bytes_before += bytes_before
        self.bytes_after += bytes_after

    def skip(self, reason: str, names: Iterable[str]) -> None:
        """Add weights that are unchanged for this reason."""
        self.skipped.setdefault(reason, []).extend(names)

    def notes(self, quantize: str, took: str = "") -> Iterator[str]:
        """Yield sentences for the user. took: the duration, in words."""
        gain = f"{self.bytes_before / 2**30:.2f} GiB became {self.bytes_after / 2**30:.2f} GiB"
        if self.count:
            count = quantity(self.count, "layer of the blocks was", "layers of the blocks were")
            yield f"quantize: {count} converted to {quantize}{took}; {gain}."
        else:
            yield f"quantize is '{quantize}', but no layer was converted."
        if self.unrotated:
            yield (
                f"quantize: {quantity(self.unrotated, 'of them has', 'of them have')} a width that isn't a multiple of "
                "16, where int8 is less exact."
            )
        for reason, layers in self.skipped.items():
            yield f"quantize: {shortlist(layers)} stayed as stored: {reason}."


def quantize_weights(
    tensors: dict[str, Tensor],
    names: Collection[str],
    quantize: str,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> QuantizeResult:
    """Quantise weights of a state dict to 8 bit, in-place, one at a time.

    tensors: the state dict; a replaced weight is removed from it, and freed if nothing else holds it.
    names: keys of the weights, (out, in) each. Those with 8 bits or fewer are unchanged.
    quantize: one of QUANTIZE but the first.
    device: computes them; the results are on the host.
    progress(index, total): called before each.
    """
    result = QuantizeResult()
    for index, name in enumerate(names):
        progress(index, len(names))
        weight, module = tensors[name], name.removesuffix(".weight")
        if weight.dtype not in WIDE or f"{module}.comfy_quant" in tensors:
            result.skip("already in 8 bit or less", [module])
            continue
        converted = quantize_weight(weight, quantize, device, torch.device("cpu"))
        if converted is None:
            result.skip("all zero, or not finite", [module])
            continue
        described = _describe(quantize, weight.shape[1])
        text = torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)
        parts = converted.state_dict(name)
        quantized_bytes = sum(tensor.nbytes for tensor in parts.values())
        result.count_quantized(weight.nbytes, quantized_bytes, quantize == INT8 and "convrot" not in described)
        tensors |= parts | {f"{module}.comfy_quant": text}
        del weight, converted
    progress(len(names), len(names))
    return result


def largest(weight: Tensor) -> Tensor:
    """Return the largest absolute value, an fp32 scalar, without copying the weight; NaN if it contains one."""
    low, high = weight.aminmax()
    return torch.maximum(-low, high).float()


def quantized_zeros(shape: tuple[int, int], quantize: str, home: torch.device) -> QuantizedTensor:
    """Make a weight of zeros in the format that `quantize_weight` returns.

    On the host its codes take no memory until they are written.
    """
    layout, options = _layout(quantize, shape[1])
    kind = QuantizedTensor.from_float(torch.zeros(1, shape[1]), layout, **options)
    codes, params = quantised_data(kind), quantised_params(kind)
    data = torch.from_numpy(np.zeros((shape[0], *codes.shape[1:]), np.uint8)).view(codes.dtype)
    scale = torch.ones(shape[0], 1) if params.scale.ndim else torch.ones(())
    params = replace(params, scale=scale.to(home), orig_shape=shape)
    return QuantizedTensor(data.to(home), layout, params)


def _layout(quantize: str, columns: int, amax: Tensor | None = None) -> tuple[str, dict[str, Any]]:
    """Return the name of ComfyUI's layout for a weight, and its options for quantising.

    amax: largest absolute value of the weight.
    """
    if quantize == FP8:
        amax = torch.ones(()) if amax is None else amax
        return "TensorCoreFP8E4M3Layout", {"scale": amax / torch.finfo(torch.float8_e4m3fn).max}
    described = _describe(quantize, columns)
    del described["format"]
    return "TensorWiseINT8Layout", {"per_channel": True, **described}


def _describe(quantize: str, columns: int) -> dict[str, Any]:
    """Return ComfyUI's description of a weight in this format, a file's `comfy_quant`."""
    if quantize == FP8:
        # Otherwise core would multiply in fp8 on cards that support it, with x cast without a scale.
        return {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}
    size = next((size for size in HADAMARD_SIZES if columns % size == 0), None)
    convrot = {} if size is None else {"convrot": True, "convrot_groupsize": size}
    return {"format": "int8_tensorwise", **convrot}


def quantize_weight(weight: Tensor, quantize: str, device: torch.device, home: torch.device) -> QuantizedTensor | None:
    """Quantise one weight (out, in), some rows at a time, so that few elements are held in fp32.

    quantize: one of QUANTIZE but the first.
    device: computes it.
    home: device of the result.

    Returns ComfyUI's own tensor; None for a weight that is all zero, or not finite.
    """
    amax = largest(weight)
    if not (torch.isfinite(amax) and amax > 0):
        return None
    layout, options = _layout(quantize, weight.shape[1], amax.to(device))
    codes: Tensor | None = None
    scales: list[Tensor] = []
    rows = max(1, SLICE // weight.shape[1])
    for start in range(0, len(weight), rows):
        # In fp32: a bf16 weight would be rotated in bf16, and so be rounded before it is quantised.
        part = QuantizedTensor.from_float(weight[start : start + rows].to(device).float(), layout, **options)
        data, params = quantised_data(part), quantised_params(part)
        if codes is None:
            codes = torch.empty(len(weight), *data.shape[1:], dtype=data.dtype, device=home)
        codes[start : start + rows] = data
        scales.append(params.scale.to(home))
    scale = torch.cat(scales) if scales[0].ndim else scales[0]
    params = replace(params, scale=scale, orig_dtype=weight.dtype, orig_shape=tuple(weight.shape))
    return QuantizedTensor(codes, layout, params)

"""Check the reading of weights: run one layer of each storage format in a MODEL both by ComfyUI's own module and with
the weights that training has read."""

import copy
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import comfy.model_management
import torch
from comfy.model_patcher import LowVramPatch, ModelPatcher
from comfy.quant_ops import QuantizedTensor
from torch import Tensor, nn

from ...common.core import intended_dtype, quantised_layout
from ...common.gguf_tensor import block_type, is_gguf, type_name, with_patches
from .frozen import FrozenWeights

log = logging.getLogger(__name__)

# The largest allowed relative difference of both outputs in fp32, by the dtypes that a weight is rounded to on the way.
# A weight that is 2 % too large exceeds each of them.
_ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_DEQUANTISED = 1e-2  # ComfyUI dequantises in 16 bits
_ROWS = 4

# Set on modules by ComfyUI's loading and by its dynamic VRAM, under which a module reads its weight through them.
LOADING = (
    "_v",
    "_prefetch",
    "_pin_state",
    "_pins",
    "weight_lowvram_function",
    "bias_lowvram_function",
    "weight_function",
    "bias_function",
)


class FormatMismatch(NamedTuple):
    """A layer that training reads differently from ComfyUI.

    name: its name in the diffusion model.
    difference: relative difference of the outputs.
    """

    name: str
    difference: float


class FormatCheck(NamedTuple):
    """Result of the check.

    mismatch: the first layer that differs; None if none does.
    kinds: the kinds of layers compared, as class and format of weight and bias.
    unknown: those that ComfyUI itself can't run on this device.
    """

    mismatch: FormatMismatch | None
    kinds: tuple[str, ...]
    unknown: tuple[str, ...]


def has_known_forward(module: nn.Module) -> bool:
    """Return whether a layer runs torch's or ComfyUI's own forward.

    Layer classes of loaders with custom weight storage, such as those for GGUF files, only override the reading of the
    weights.
    """
    return type(module).forward.__module__.startswith(("torch.nn", "comfy.ops"))


def check_format(weights: FrozenWeights, forwards: Mapping[str, Callable[[Tensor], Tensor]]) -> FormatMismatch | None:
    """Return the first mismatch layer of `compare_formats`, None without one."""
    compared = compare_formats(weights, forwards)
    if compared.unknown:
        log.warning("ComfyUI can't run %s here, so their reading is not compared.", ", ".join(compared.unknown))
    return compared.mismatch


def compare_formats(weights: FrozenWeights, forwards: Mapping[str, Callable[[Tensor], Tensor]]) -> FormatCheck:
    """Compare one module of each kind and format, up to the first that differs.

    forwards: for each module name, a function that runs it on an fp32 input with the weights that training has read, on
        `weights.device`.

    Modules whose input shape is not known from their class are skipped. One weight is held at a time, and the MODEL is
    unchanged. Under dynamic VRAM the weight is the one that ComfyUI keeps on the host.
    """
    kinds: dict[tuple[Any, ...], str] = {}
    unknown: list[str] = []
    for name, run in forwards.items():
        module = weights.patcher.model.get_submodule(f"diffusion_model.{name}".rstrip("."))
        sample = _input_of(module, weights)
        patched = any(f"diffusion_model.{name}.{part}" in weights.patcher.patches for part in ("weight", "bias"))
        if sample is None or (patched and not _casts(module)):
            continue
        formats = [_format(getattr(module, part, None)) for part in ("weight", "bias")]
        kind = (type(module), patched, *formats)
        if kind in kinds:
            continue
        kinds[kind] = " ".join([type(module).__name__, *filter(None, formats), *["with a LoRA"] * patched])
        core = _as_core_runs(weights, name, module)
        difference = _difference(run, core, sample)
        if difference is None:
            unknown.append(kinds[kind])
        elif not difference <= _limit(core.weight, weights.compute_dtype):
            return FormatCheck(FormatMismatch(name, difference), tuple(kinds.values()), tuple(unknown))
    return FormatCheck(None, tuple(kind for kind in kinds.values() if kind not in unknown), tuple(unknown))


def _limit(weight: Any, compute_dtype: torch.dtype) -> float:
    if isinstance(weight, QuantizedTensor) or weight.dtype.itemsize == 1 or is_gguf(weight):
        return _DEQUANTISED
    return max(_ROUNDING[compute_dtype], _ROUNDING.get(weight.dtype, 0.0))


def _format(weight: Any) -> str:
    if weight is None:
        return ""
    if block_type(weight) is not None:
        return type_name(weight)
    return quantised_layout(weight) if isinstance(weight, QuantizedTensor) else str(weight.dtype)


def _input_of(module: nn.Module, weights: FrozenWeights) -> Tensor | None:
    """Make a random fp32 input, x and then −x, for a module that runs torch's or ComfyUI's forward; None for others.

    Linears and convolutions get signs, ±1: a kernel that rounds its input to few bits leaves them exact.
    """
    layer: Any = module
    if not has_known_forward(module) or getattr(layer, "weight", None) is None:
        return None
    generator = torch.Generator().manual_seed(0)
    if hasattr(layer, "in_features"):
        shape: tuple[int, ...] = (_ROWS, layer.in_features)
    elif hasattr(layer, "in_channels") and not getattr(layer, "transposed", True):
        shape = (
            1,
            layer.in_channels,
            *(d * (k - 1) + 2 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)),
        )
    elif hasattr(layer, "normalized_shape"):
        shape = (_ROWS, *layer.normalized_shape)
    elif hasattr(layer, "num_channels"):
        shape = (1, layer.num_channels, _ROWS)
    elif hasattr(layer, "num_embeddings"):
        return torch.randint(0, layer.num_embeddings, (_ROWS,), generator=generator).to(weights.device)
    else:
        return None
    noise = torch.randn(shape, generator=generator)
    signs = hasattr(layer, "in_features") or hasattr(layer, "in_channels")
    half = noise.sign() if signs else noise
    return torch.cat((half, -half)).to(weights.device)


def _as_core_runs(weights: FrozenWeights, name: str, module: nn.Module) -> nn.Module:
    """Copy the MODEL's own module with its LoRAs and ComfyUI's casting, as it runs if its weights are offloaded."""
    clone: Any = copy.copy(module)  # shares the weights; attributes set below affect only the copy
    for attribute in LOADING:
        vars(clone).pop(attribute, None)
    if _casts(module):
        clone.comfy_cast_weights = True
        clone.comfy_force_cast_weights = True  # otherwise some formats round the input
        if isinstance(clone.weight, QuantizedTensor) and hasattr(clone, "in_features"):
            clone.weight_function = [nn.Identity()]  # otherwise the matmul rounds the input, even to 4 bits
    parameters = vars(clone)["_parameters"] = dict(clone._parameters)
    in_blocks = any(block_type(weight) is not None for weight in parameters.values())
    for part in ("weight", "bias"):
        key, dtype = f"diffusion_model.{name}.{part}", intended_dtype(module, part)
        patched = key in weights.patcher.patches
        stored: Any = parameters.get(part)
        rounded = patched and _is_narrow(stored, dtype)
        if rounded:
            # As a whole load has it: without this rounding a right weight would differ by up to 0.2 in 4 bits.
            by_core = ModelPatcher.patch_weight_to_device(
                weights.patcher, key, device_to=weights.device, return_weight=True
            )
            parameters[part] = nn.Parameter(by_core, requires_grad=False)
        if dtype is not None and type(getattr(parameters.get(part), "data", None)) is Tensor:
            # As dynamic VRAM casts it at each use.
            parameters[part] = nn.Parameter(parameters[part].data.to(dtype), requires_grad=False)
        if patched and in_blocks and is_gguf(stored):
            parameters[part] = with_patches(stored, [(weights.patcher.patches[key], key)])
        elif patched and not rounded:
            setattr(clone, f"{part}_function", [LowVramPatch(key, weights.patcher.patches)])
    return clone


def _is_narrow(weight: Any, dtype: torch.dtype | None) -> bool:
    """Return whether a weight is used in 8 bits or fewer, into which ComfyUI rounds a LoRA; not one of a GGUF file."""
    return isinstance(weight, QuantizedTensor) or (not is_gguf(weight) and (dtype or weight.dtype).itemsize == 1)


@torch.no_grad()
def _difference(forward: Callable[[Tensor], Tensor], core: Any, x: Tensor) -> float | None:
    """Return the relative difference; None if ComfyUI itself cannot run the module so, as some formats on some
    devices."""
    if x.is_floating_point() and not _casts(core):
        x = x.to(core.weight.dtype)
    try:
        expected = core(x if _casts(core) else x.to(core.weight.device)).float().cpu()
    except RuntimeError as error:
        if comfy.model_management.is_oom(error):
            raise
        return None
    actual = forward(x).float().cpu()
    if not x.is_floating_point():
        return relative_error(actual, expected)
    # x and −x: separates the weight from a large bias, which would hide its error.
    (a, b), (c, d) = actual.chunk(2), expected.chunk(2)
    return max(relative_error(a - b, c - d), relative_error(a + b, c + d, 0.3 * float((c - d).norm())))


def relative_error(actual: Tensor, expected: Tensor, least: float = 1e-12) -> float:
    """Return ‖actual − expected‖ / max(‖expected‖, `least`), infinite for NaN."""
    error = float((actual - expected).norm()) / max(float(expected.norm()), least)
    return error if error >= 0 else math.inf


def _casts(module: nn.Module) -> bool:
    """Return True for a class of ComfyUI's that takes an input of any dtype on any device."""
    return hasattr(module, "forward_comfy_cast_weights")

"""A check of reading: of each format in which a MODEL stores weights one layer is run by ComfyUI's own module and by
what training read of it."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import comfy.model_management
import torch
from comfy.model_patcher import LowVramPatch
from comfy.quant_ops import QuantizedTensor
from torch import Tensor, nn

from ...common.core import intended_dtype, quantised_layout
from ...common.gguf_tensor import block_type, is_gguf, type_name, with_patches
from .frozen import FrozenWeights

# The largest relative difference of what both give in fp32: by the dtypes that a weight is rounded to on its way. A
# weight that is 2 % too large is beyond each of them.
_ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_DEQUANTISED = 1e-2  # ComfyUI dequantises in 16 bits
_PATCHED = 0.4  # a LoRA on weights of 4 bits, rounded at random, leaves them up to 0.2 from what they were without it
_ROWS = 4

# Set on modules by ComfyUI's loading, and by its dynamic VRAM: there a module reads its weight through them.
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


class Misread(NamedTuple):
    """A layer, by its name in the diffusion model, that training reads otherwise than ComfyUI does.

    difference: relative, of what the two give.
    """

    name: str
    difference: float


def has_known_forward(module: nn.Module) -> bool:
    """Tell whether a layer runs torch's or ComfyUI's own forward.

    Classes of loaders that store weights in a way of their own, such as those for GGUF files, are ComfyUI's but for how
    they read them.
    """
    return type(module).forward.__module__.startswith(("torch.nn", "comfy.ops"))


def find_misread(weights: FrozenWeights, ours: Mapping[str, Callable[[Tensor], Tensor]]) -> Misread | None:
    """Compare one module of each kind and format; None where none differs.

    ours: runs the module called so on an fp32 input with the weights that training has read of it, on
        `weights.device`.

    Modules whose input is not known from their class are left out. One weight is held at a time, and the MODEL is not
    changed. Under dynamic VRAM the weight is the one that ComfyUI keeps on the host.
    """
    seen = set()
    for name, run in ours.items():
        module = weights.patcher.model.get_submodule(f"diffusion_model.{name}".rstrip("."))
        made = _input_of(module, weights)
        patched = any(f"diffusion_model.{name}.{part}" in weights.patcher.patches for part in ("weight", "bias"))
        if made is None or (patched and not _casts(module)):
            continue
        kind = (type(module), patched, *(_format(getattr(module, part, None)) for part in ("weight", "bias")))
        if kind in seen:
            continue
        seen.add(kind)
        core = _as_core_runs(weights, name, module)
        if not (difference := _difference(run, core, made)) <= _limit(core.weight, patched, weights.compute_dtype):
            return Misread(name, difference)
    return None


def _limit(weight: Any, patched: bool, compute_dtype: torch.dtype) -> float:
    if isinstance(weight, QuantizedTensor) or (weight.dtype.itemsize == 1 and not is_gguf(weight)):
        return _PATCHED if patched else _DEQUANTISED
    if is_gguf(weight):
        return _DEQUANTISED
    return max(_ROUNDING[compute_dtype], _ROUNDING.get(weight.dtype, 0.0))


def _format(weight: Any) -> str:
    if weight is None:
        return ""
    if block_type(weight) is not None:
        return type_name(weight)
    return quantised_layout(weight) if isinstance(weight, QuantizedTensor) else str(weight.dtype)


def _input_of(module: nn.Module, weights: FrozenWeights) -> Tensor | None:
    """Random fp32 input of a module that runs torch's or ComfyUI's forward, x and then −x; None for any other.

    Signs go into matrices: a kernel that rounds its input to few bits leaves them as they are.
    """
    known: Any = module
    if not has_known_forward(module) or getattr(known, "weight", None) is None:
        return None
    generator = torch.Generator().manual_seed(0)
    if hasattr(known, "in_features"):
        shape: tuple[int, ...] = (_ROWS, known.in_features)
    elif hasattr(known, "in_channels") and not getattr(known, "transposed", True):
        shape = (
            1,
            known.in_channels,
            *(d * (k - 1) + 2 for d, k in zip(known.dilation, known.kernel_size, strict=True)),
        )
    elif hasattr(known, "normalized_shape"):
        shape = (_ROWS, *known.normalized_shape)
    elif hasattr(known, "num_channels"):
        shape = (1, known.num_channels, _ROWS)
    elif hasattr(known, "num_embeddings"):
        return torch.randint(0, known.num_embeddings, (_ROWS,), generator=generator).to(weights.device)
    else:
        return None
    noise = torch.randn(shape, generator=generator)
    signs = hasattr(known, "in_features") or hasattr(known, "in_channels")
    half = noise.sign() if signs else noise
    return torch.cat((half, -half)).to(weights.device)


def _as_core_runs(weights: FrozenWeights, name: str, module: nn.Module) -> nn.Module:
    """The MODEL's own module with its LoRAs and ComfyUI's own casting, as it runs where it lies in other memory."""
    own: Any = copy.copy(module)  # shares the weights; what is set here stays here
    for attribute in LOADING:
        vars(own).pop(attribute, None)
    if _casts(module):
        own.comfy_cast_weights = True
        own.comfy_force_cast_weights = True  # else some formats round the input
        if isinstance(own.weight, QuantizedTensor) and hasattr(own, "in_features"):
            own.weight_function = [nn.Identity()]  # else the product itself rounds the input, to 4 bits even
    held = vars(own)["_parameters"] = dict(own._parameters)
    in_blocks = any(block_type(weight) is not None for weight in held.values())
    for part in ("weight", "bias"):
        key, wanted = f"diffusion_model.{name}.{part}", intended_dtype(module, part)
        if wanted is not None and type(getattr(held.get(part), "data", None)) is Tensor:
            # As dynamic VRAM casts it at each use.
            held[part] = nn.Parameter(held[part].data.to(wanted), requires_grad=False)
        if key in weights.patcher.patches and in_blocks and is_gguf(held[part]):
            held[part] = with_patches(held[part], [(weights.patcher.patches[key], key)])
        elif key in weights.patcher.patches:
            setattr(own, f"{part}_function", [LowVramPatch(key, weights.patcher.patches)])
    return own


@torch.no_grad()
def _difference(ours: Callable[[Tensor], Tensor], core: Any, x: Tensor) -> float:
    """0 where ComfyUI itself cannot run the module so, as some formats on some devices."""
    if x.is_floating_point() and not _casts(core):
        x = x.to(core.weight.dtype)
    try:
        wanted = core(x if _casts(core) else x.to(core.weight.device)).float().cpu()
    except RuntimeError as error:
        if comfy.model_management.is_oom(error):
            raise
        return 0.0
    found = ours(x).float().cpu()
    if not x.is_floating_point():
        return _relative(found, wanted)
    # x and −x: a large bias hides nothing of the weight.
    (a, b), (c, d) = found.chunk(2), wanted.chunk(2)
    return max(_relative(a - b, c - d), _relative(a + b, c + d, 0.3 * float((c - d).norm())))


def _relative(found: Tensor, wanted: Tensor, least: float = 1e-12) -> float:
    """‖found − wanted‖ / ‖wanted‖, or / `least` where that is more; NaN is infinite."""
    error = float((found - wanted).norm()) / max(float(wanted.norm()), least)
    return error if error >= 0 else math.inf


def _casts(module: nn.Module) -> bool:
    """True for a class of ComfyUI's that takes an input of any dtype on any device."""
    return hasattr(module, "forward_comfy_cast_weights")

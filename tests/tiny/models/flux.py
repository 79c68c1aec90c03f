"""A tiny FLUX.1 in Black Forest Labs' checkpoint format, as `UNETLoader` reads it, and samples for it and FLUX.2."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..data.encoders import CLIP_WIDTH, T5_WIDTH
from .weights import fill

# isort: split
from tessera_try_it.denoiser import make_denoiser
from tessera_try_it.flux import flux_shapes

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
# Of samples: (latent channels, latent cells along a side of a token, the least that captions are padded to)
SAMPLE_SHAPES = {"flux": (16, 2, 0), "flux2": (128, 1, 512)}


# By name: ComfyUI's format, further fields of its layer's description, and options of its layout for quantising.
QUANTISED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp8": ("float8_e4m3fn", {}, {}),
    "fp8 by rows": ("float8_e4m3fn", {}, {}),
    "nvfp4": ("nvfp4", {}, {}),
    "nvfp4 smoothed": ("nvfp4", {}, {}),
    "mxfp8": ("mxfp8", {}, {}),
    "int8": ("int8_tensorwise", {}, {}),
    "int8 by rows": ("int8_tensorwise", {}, {"per_channel": True}),
    "int8 rotated": (
        "int8_tensorwise",
        {"convrot": True, "convrot_groupsize": 64},
        {"per_channel": True, "convrot": True, "convrot_groupsize": 64},
    ),
    "int4 rotated": ("convrot_w4a4", {"convrot_groupsize": 64}, {"convrot_groupsize": 64}),
}


def quantise_layer(weight: Tensor, kind_name: str, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Quantise a weight as a file of `kind_name` (one of QUANTISED) holds it: (its tensors by suffix of the layer's
    name, the layer's description)."""
    kind, described, settings = QUANTISED[kind_name]
    conf = {"format": kind, **described}
    if kind == "float8_e4m3fn":
        scale = weight.abs().amax(dim=1, keepdim=True) if kind_name == "fp8 by rows" else weight.abs().max()
        scale = (scale / FP8_MAX).float()
        return {".weight": (weight / scale).to(torch.float8_e4m3fn), ".weight_scale": scale}, conf
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    tensors = {}
    if kind_name == "nvfp4 smoothed":
        source = torch.Generator().manual_seed(seed)
        tensors[".pre_quant_scale"] = 0.5 + torch.rand(weight.shape[1], generator=source)
        weight = weight / tensors[".pre_quant_scale"]
    quantised = QuantizedTensor.from_float(weight, QUANT_ALGOS[kind]["comfy_tensor_layout"], **settings)
    return tensors | {f".weight{name}": _bytes_of(t) for name, t in quantised.state_dict().items()}, conf


def _bytes_of(tensor: Tensor) -> Tensor:
    """Exponents are written as bytes, as the files in use have them."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e8m0fnu else tensor


def quantised_blocks(
    tensors: dict[str, Tensor], kind_name: str, inside: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (the tensors of the block matrices in a file of `kind_name`, the metadata about them). inside: for those
    with this in their names."""
    stored, layers = {}, {}
    for number, name in enumerate(n for n in tensors if n.endswith(".weight") and "_blocks." in n and inside in n):
        layer = name.removesuffix(".weight")
        layer_tensors, layers[layer] = quantise_layer(tensors[name], kind_name, number)
        stored.update({f"{layer}{suffix}": tensor for suffix, tensor in layer_tensors.items()})
    return stored, {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


def write_flux(
    path: Path,
    *,
    hidden: int = 128,
    depth: int = 2,
    depth_single: int = 2,
    context_dim: int = T5_WIDTH,
    vec_dim: int = CLIP_WIDTH,
    guidance: bool = True,
    dtype: torch.dtype = torch.float32,
    fp8: bool = False,
    quantised: str | None = None,
    quantised_inside: str = "",
    denoiser: bool = False,
    seed: int = 0,
) -> Path:
    """Write a FLUX.1 checkpoint: dev-like, or schnell-like with `guidance=False`.

    `dtype` is stored for every tensor (torch.float8_e4m3fn gives a plain fp8 file). `fp8` gives ComfyUI's scaled fp8:
    the block matrices in fp8 with a scale each, the rest in `dtype`; `quantised` another of QUANTISED, for those whose
    names have `quantised_inside`. `denoiser` gives a model that removes noise and has only pictures to learn, in place
    of a random one.
    """
    tensors = fill(flux_shapes(hidden, depth, depth_single, context_dim, vec_dim, guidance), seed)
    if denoiser:
        make_denoiser(tensors)
    metadata = {"format": "pt"}
    stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if fp8 or quantised:
        blocks, described = quantised_blocks(tensors, quantised or "fp8", quantised_inside)
        stored, metadata = stored | blocks, metadata | described
    save_file(stored, path, metadata)
    return path


def load_flux(path: Path, dtype: torch.dtype | None = None) -> Any:
    """The MODEL that `UNETLoader` gives for this file; `dtype` is its `weight_dtype`."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path), model_options={} if dtype is None else {"dtype": dtype})


def flux_sample(
    name: str,
    height: int,
    width: int,
    text: int = 7,
    references: Sequence[tuple[int, int]] = (),
    *,
    family: str = "flux2",
    method: str | None = None,
    tokens: int | None = None,
    repeats: int = 1,
    scale: float = 1.0,
) -> Any:
    """A sample whose numbers are a function of its name. height, width: in tokens; text: tokens of the caption;
    references: (height, width) of each, in latent cells; tokens: how many are kept."""
    from tessera.data.samples import Sample, SampleTensors

    channels, patch, least = SAMPLE_SHAPES[family]
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    latent = scale * torch.randn(channels, patch * height, patch * width, generator=generator)
    encoded = torch.randn(1, text, T5_WIDTH, generator=generator)
    conditioning: dict[str, Any] = {"pooled_output": None}
    if family == "flux":
        conditioning = {"pooled_output": torch.randn(1, CLIP_WIDTH, generator=generator)}
    if references:
        conditioning["reference_latents"] = [torch.randn(1, channels, h, w, generator=generator) for h, w in references]
    if method is not None:
        conditioning["reference_latents_method"] = method
    tensors = SampleTensors(latent, encoded, conditioning)
    return Sample(
        name,
        (1, height, width),
        tokens or height * width,
        max(least, text),
        lambda *_: tensors,
        repeats,
        references=tuple(-(-h // patch) * -(-w // patch) for h, w in references),
        conditioning=frozenset(conditioning),
    )

"""A tiny Chroma in lodestones' checkpoint format with the sizes of its approximator injected, and samples for it."""

from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import save_file

from ..data.encoders import T5_WIDTH
from .flux import flux_shapes
from .injection import load_injected, sizes_metadata
from .weights import Shapes, fill, linear

APPROXIMATOR = "distilled_guidance_layer"
# The inputs are as many in every Chroma.
APPROXIMATOR_WIDTH = 48
APPROXIMATOR_LAYERS = 2
APPROXIMATOR_INPUTS = 64


def chroma_shapes(hidden: int, depth: int, depth_single: int, context_dim: int) -> Shapes:
    """Names and shapes of Chroma's parameters: FLUX.1's without what computes its modulation, and the approximator."""
    flux = flux_shapes(hidden, depth, depth_single, context_dim, 1, guidance=False)
    left_out = ("time_in.", "vector_in.", "final_layer.adaLN_modulation.")
    shapes = {
        n: s for n, s in flux.items() if not n.startswith(left_out) and "_mod." not in n and ".modulation" not in n
    }
    width = APPROXIMATOR_WIDTH
    linear(shapes, f"{APPROXIMATOR}.in_proj", APPROXIMATOR_INPUTS, width)
    for index in range(APPROXIMATOR_LAYERS):
        linear(shapes, f"{APPROXIMATOR}.layers.{index}.in_layer", width, width)
        linear(shapes, f"{APPROXIMATOR}.layers.{index}.out_layer", width, width)
        shapes[f"{APPROXIMATOR}.norms.{index}.scale"] = (width,)
    linear(shapes, f"{APPROXIMATOR}.out_proj", width, hidden)
    return shapes


def write_chroma(
    path: Path,
    *,
    hidden: int = 128,
    depth: int = 2,
    depth_single: int = 2,
    context_dim: int = T5_WIDTH,
    dtype: torch.dtype = torch.float32,
    radiance: bool = False,
    quiet: bool = False,
    seed: int = 0,
) -> Path:
    """Write a Chroma checkpoint. `radiance` makes it the pixel-space model, in what ComfyUI knows it by: most of its
    own weights are not there. `quiet` carries its input through to its output, past blocks that add little, which takes
    a width of 128 or more."""
    tensors = fill(chroma_shapes(hidden, depth, depth_single, context_dim), seed)
    tensors[f"{APPROXIMATOR}.out_proj.weight"] *= 0.5  # the vectors are of the size of FLUX's tiny modulations
    if quiet:
        identity = torch.eye(hidden, len(tensors["final_layer.linear.bias"]))
        tensors["img_in.weight"] = 0.02 * tensors["img_in.weight"] + identity
        tensors["final_layer.linear.weight"] = 0.02 * tensors["final_layer.linear.weight"] + identity.T
        for name in tensors:
            if name.endswith(
                ("_attn.proj.weight", "_mlp.2.weight", "linear2.weight", f"{APPROXIMATOR}.out_proj.weight")
            ):
                tensors[name] = 0.2 * tensors[name]
    sizes = {"out_dim": hidden, "hidden_dim": APPROXIMATOR_WIDTH, "n_layers": APPROXIMATOR_LAYERS}
    if radiance:
        tensors = {n: t for n, t in tensors.items() if not n.startswith(("img_in.", "final_layer."))}
        tensors["img_in_patch.weight"] = torch.zeros(hidden, 3, 16, 16)
        tensors["nerf_blocks.0.norm.scale"] = torch.ones(16)
        sizes |= {"nerf_hidden_size": 16, "nerf_depth": 1}
    metadata = {"format": "pt"} | sizes_metadata("ChromaRadiance" if radiance else "Chroma", sizes)
    save_file({name: t.to(dtype) for name, t in tensors.items()}, path, metadata)
    return path


def load_chroma(path: Path, dtype: torch.dtype | None = None) -> Any:
    """The MODEL that `UNETLoader` gives for this file; `dtype` is its `weight_dtype`."""
    return load_injected(path, {} if dtype is None else {"dtype": dtype})


def chroma_sample(
    name: str,
    height: int,
    width: int,
    text_length: int = 16,
    tokens: int | None = None,
    scale: float = 1.0,
    **conditioning: Any,
) -> Any:
    """A sample of height x width tokens whose numbers are a function of its name. The caption is padded as
    the family does. conditioning: such as a guidance."""
    from tessera.data.samples import Sample, SampleTensors
    from tessera.models.text import padded_length

    generator = torch.Generator().manual_seed(crc32(name.encode()))
    latent = scale * torch.randn(16, 2 * height, 2 * width, generator=generator)
    tensors = SampleTensors(latent, torch.randn(1, text_length, T5_WIDTH, generator=generator), conditioning)
    return Sample(
        name,
        (1, height, width),
        tokens or height * width,
        padded_length(text_length),
        lambda *_: tensors,
        conditioning=frozenset(conditioning),
    )

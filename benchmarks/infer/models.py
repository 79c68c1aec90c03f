"""Demands of a step of the inference benchmark, and the model of its session.

Needs ComfyUI's model classes and the small writers of tests/tiny only; neither the node API nor the server is imported.
"""

from dataclasses import dataclass
from functools import partial

import torch
from families import MODELS as BY_SIZE
from families import Model, Picture, tiny

SESSION = {"flux": Model("flux", Picture(256, 256, 64), partial(tiny.write_flux, hidden=256, depth=3, depth_single=4))}
MODELS = BY_SIZE | {"session": SESSION}


@dataclass(frozen=True)
class Work:
    """Of one step: parameters of the model, shape of the latent, FLOP of all matrix products."""

    parameters: int
    latent: tuple[int, ...]
    flop: int


def count_work(model: Model, file: str, picture: Picture) -> Work:
    """Count ComfyUI's own forward on the meta device. file: of a small model."""
    from torch.utils.flop_counter import FlopCounterMode

    base = model.load(file, "meta", torch.bfloat16 if model.write is None else torch.float32).model
    transformer, dtype = base.diffusion_model, base.get_dtype_inference()
    inputs = tiny.INPUTS[model.inputs()]
    latent = tiny.empty_latent(model.inputs(), picture.width, picture.height, picture.batch, picture.frames)
    latent = latent.unsqueeze(2) if model.kind == "qwen_image" else latent

    def empty(*size: int, item_dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(picture.batch, *size, dtype=item_dtype, device="meta")

    extra: dict[str, torch.Tensor] = {}
    if model.kind == "flux":
        extra = {"y": empty(inputs.pooled_width), "guidance": empty()}
    elif model.kind == "chroma":
        extra = {"guidance": empty()}
    elif model.kind == "sdxl":
        extra = {"y": empty(inputs.pooled_width + tiny.models.sdxl.SIZE_EMBEDDINGS)}
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        transformer(
            empty(*latent.shape[1:]),
            empty(item_dtype=torch.float32),
            context=empty(picture.length, inputs.text_width),
            transformer_options={},
            **extra,
        )
    parameters = sum(p.numel() for p in transformer.parameters())
    return Work(parameters, tuple(latent.shape), counter.get_total_flops())

"""What the inference benchmark samples: each family small, from a file, or in its real shape with random weights.

Needs ComfyUI's model classes and the small writers of tests/tiny only; neither the node API nor the server is imported.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from train_step_model import SHAPES, detected, load_tiny_writers, random_flux, random_model

tiny = load_tiny_writers()

# SDXL's UNet as ComfyUI reads it from the weights.
SDXL_UNET = {
    "use_checkpoint": False,
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 2, 4],
    "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_middle": 10,
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "use_spatial_transformer": True,
    "use_linear_in_transformer": True,
    "legacy": False,
    "num_classes": "sequential",
    "adm_in_channels": 2816,
    "context_dim": 2048,
    "num_head_channels": 64,
    "use_temporal_attention": False,
    "use_temporal_resblock": False,
}


@dataclass(frozen=True)
class Picture:
    """What is sampled. length: tokens of the prompt; lora: empty or the name of one."""

    width: int
    height: int
    length: int
    frames: int = 1
    batch: int = 1
    lora: str = ""


@dataclass(frozen=True)
class Model:
    """A small model has a `write`, which makes its file; one of the real shape has a `make(device, dtype)`, which gives
    a MODEL of random weights. kind: its name in tests/tiny; text_width and pooled_width: of the real shape's prompt."""

    kind: str
    picture: Picture
    write: Callable[[Path], Path] | None = None
    make: Callable[[str, torch.dtype], Any] | None = None
    text_width: int = 0
    pooled_width: int = 0

    def inputs(self) -> str:
        """The name under which tests/tiny knows what this model takes."""
        if self.write is not None:
            return self.kind
        name = f"{self.kind} full"
        real = replace(tiny.INPUTS[self.kind], text_width=self.text_width, pooled_width=self.pooled_width)
        tiny.INPUTS[name] = real
        return name


def write_flux(path: Path) -> Path:
    """The FLUX.1 of the step benchmark."""
    shape = SHAPES["tiny"]
    return tiny.write_flux(path, hidden=shape.hidden, depth=shape.depth, depth_single=shape.depth_single)


def write_seven_blocks(path: Path) -> Path:
    """The FLUX.1 of the session."""
    return tiny.write_flux(path, hidden=256, depth=3, depth_single=4)


def make_wan(dim: int, ffn: int, layers: int, device: str, dtype: torch.dtype) -> Any:
    return random_model(detected(tiny.wan.wan_shapes(dim, ffn, layers, 0, TEXT_WIDTH), dtype), device, dtype)


def make_qwen_image(device: str, dtype: torch.dtype) -> Any:
    return random_model(detected(tiny.qwen_image.qwen_image_shapes(24, 128, 60, 3584), dtype), device, dtype)


def make_sdxl(device: str, dtype: torch.dtype) -> Any:
    from comfy.supported_models import SDXL

    return random_model(SDXL(dict(SDXL_UNET)), device, dtype)


TEXT_WIDTH = 4096  # of T5 and umT5
VIDEO = Picture(832, 480, 512, frames=81)
FULL: dict[str, Model] = {
    "flux": Model("flux", Picture(1024, 1024, 512), None, partial(random_flux, SHAPES["full"]), TEXT_WIDTH, 768),
    "wan": Model("wan", VIDEO, None, partial(make_wan, 5120, 13824, 40), TEXT_WIDTH),
    "wan_1.3b": Model("wan", VIDEO, None, partial(make_wan, 1536, 8960, 30), TEXT_WIDTH),
    "qwen_image": Model("qwen_image", Picture(1024, 1024, 128), None, make_qwen_image, 3584),
    "sdxl": Model("sdxl", Picture(1024, 1024, 77), None, make_sdxl, 2048, 1280),
}
TINY: dict[str, Model] = {
    "flux": Model("flux", Picture(512, 512, 128), write_flux),
    "wan": Model("wan", Picture(256, 256, 128, frames=13), partial(tiny.write_wan, dim=256, layers=4)),
    "qwen_image": Model("qwen_image", Picture(512, 512, 64), partial(tiny.write_qwen_image, heads=4, layers=4)),
    "sdxl": Model("sdxl", Picture(512, 512, 77), partial(tiny.write_sdxl, channels=64)),
}
SESSION = {"flux": Model("flux", Picture(256, 256, 64), write_seven_blocks)}
MODELS = {"full": FULL, "tiny": TINY, "session": SESSION}


@dataclass(frozen=True)
class Work:
    """Of one step: parameters of the model, shape of the latent, FLOP of all matrix products."""

    parameters: int
    latent: tuple[int, ...]
    flop: int


def count_work(model: Model, file: str, picture: Picture) -> Work:
    """Counts ComfyUI's own forward on the meta device. file: of a small model."""
    from torch.utils.flop_counter import FlopCounterMode

    if model.make is not None:
        base = model.make("meta", torch.bfloat16).model
    else:
        base = tiny.load_model(model.kind, Path(file)).model
    transformer = base.diffusion_model.to("meta")
    dtype = base.get_dtype_inference()
    inputs = tiny.INPUTS[model.inputs()]
    latent = tiny.empty_latent(model.inputs(), picture.width, picture.height, picture.batch, picture.frames)
    latent = latent.unsqueeze(2) if model.kind == "qwen_image" else latent

    def empty(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(picture.batch, *size, dtype=of, device="meta")

    extra: dict[str, torch.Tensor] = {}
    if model.kind == "flux":
        extra = {"y": empty(inputs.pooled_width), "guidance": empty()}
    elif model.kind == "sdxl":
        extra = {"y": empty(inputs.pooled_width + tiny.sdxl.SIZE_EMBEDDINGS)}
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        transformer(
            empty(*latent.shape[1:]),
            empty(of=torch.float32),
            context=empty(picture.length, inputs.text_width),
            transformer_options={},
            **extra,
        )
    parameters = sum(p.numel() for p in transformer.parameters())
    return Work(parameters, tuple(latent.shape), counter.get_total_flops())

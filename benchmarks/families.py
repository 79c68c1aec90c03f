"""Models of the benchmarks: each family small, from a file, or in its real shape with random weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from comfyui import load_tiny_writers

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

# dtype → an entry of comfy.supported_models.
Entry = Callable[[torch.dtype], Any]


@dataclass(frozen=True)
class Picture:
    """Sample to train on or to make. length: tokens of the text, as the family's encoder gives it; lora: empty or the
    name of one."""

    width: int
    height: int
    length: int
    frames: int = 1
    batch: int = 1
    lora: str = ""


@dataclass(frozen=True)
class Model:
    """A small model has a `write`, which makes its file; one of the real shape has an `entry` of ComfyUI's table of
    models. kind: its name in tests/tiny; text_width and pooled_width: of the real shape's text."""

    kind: str
    picture: Picture
    write: Callable[[Path], Path] | None = None
    entry: Entry | None = None
    text_width: int = 0
    pooled_width: int = 0

    def inputs(self) -> str:
        """Return the name of this model in `tiny.INPUTS`."""
        if self.write is not None:
            return self.kind
        name = f"{self.kind} full"
        real = replace(tiny.INPUTS[self.kind], text_width=self.text_width, pooled_width=self.pooled_width)
        tiny.INPUTS[name] = real
        return name

    def load(self, file: str, device: str, dtype: torch.dtype, on_host: bool = False) -> Any:
        """A small model's MODEL as `UNETLoader` gives it for its file and that `weight_dtype`; one of the real shape as
        `random_model` makes it. On 'meta' either has no weights."""
        if self.entry is not None:
            return random_model(self.entry, device, dtype, on_host)
        patcher = getattr(tiny, f"load_{self.kind}")(Path(file), dtype)
        if device == "meta":
            patcher.model.to("meta")
        return patcher


def detected(shapes: Callable[..., dict[str, tuple[int, ...]]], sizes: tuple[Any, ...], dtype: torch.dtype) -> Any:
    """Configuration that ComfyUI detects in a file with weights of these names and shapes."""
    from comfy import model_detection

    state = {name: torch.empty(size, dtype=dtype, device="meta") for name, size in shapes(*sizes).items()}
    return model_detection.model_config_from_unet(state, "")


def sdxl(dtype: torch.dtype) -> Any:
    from comfy.supported_models import SDXL

    return SDXL(dict(SDXL_UNET))


def random_model(
    entry: Entry, device: str, dtype: torch.dtype, on_host: bool = False, disable_dynamic: bool = False
) -> Any:
    """Make a MODEL with random weights generated on `device`, moved to the host if `on_host`; on 'meta' it has none.

    dtype: of the weights; an fp8 one is computed in bf16.
    disable_dynamic: ignored; ComfyUI passes it when it copies a MODEL for core's trainer.
    """
    from comfy import model_management
    from comfy.model_patcher import ModelPatcher

    config = entry(dtype)
    config.set_inference_dtype(dtype, torch.bfloat16 if dtype.itemsize == 1 else None)
    model = config.get_model({}, "", device="cpu" if on_host else device)
    if device != "meta":
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for name, weight in model.diffusion_model.named_parameters():
                values = torch.empty_like(weight, device=device, dtype=torch.bfloat16 if dtype.itemsize == 1 else None)
                if weight.ndim == 1 and not name.endswith("bias"):
                    values.fill_(1.0)  # of a norm
                else:
                    inputs = weight[0].numel() if weight.ndim > 1 else len(weight)
                    values.normal_(0.0, inputs**-0.5, generator=generator)
                weight.copy_(values)
    place = torch.device("meta") if device == "meta" else model_management.get_torch_device()
    patcher = ModelPatcher(model, load_device=place, offload_device=torch.device("cpu") if on_host else place)
    patcher.cached_patcher_init = (random_model, (entry, device, dtype, on_host))
    return patcher


def _shaped_entry(shapes: Callable[..., dict[str, tuple[int, ...]]], *sizes: Any) -> Entry:
    return partial(detected, shapes, sizes)


T5_WIDTH = 4096  # of umT5 too
ONE_MEGAPIXEL = Picture(1024, 1024, 512)
VIDEO = Picture(832, 480, 512, frames=81)
_flux = tiny.models.flux.flux_shapes
_flux2 = tiny.models.flux2.flux2_shapes
_chroma = tiny.models.chroma.chroma_shapes
_wan, _qwen_image = tiny.models.wan.wan_shapes, tiny.models.qwen_image.qwen_image_shapes
FULL: dict[str, Model] = {
    "flux": Model("flux", ONE_MEGAPIXEL, None, _shaped_entry(_flux, 3072, 19, 38, T5_WIDTH, 768, True), T5_WIDTH, 768),
    # FLUX.2 klein reads three layers of Qwen3 4B (2560 wide) or 8B (4096 wide), 512 tokens.
    "flux2_klein": Model("flux2", ONE_MEGAPIXEL, None, _shaped_entry(_flux2, 3072, 5, 20, 7680, False), 7680),
    "flux2_klein_9b": Model("flux2", ONE_MEGAPIXEL, None, _shaped_entry(_flux2, 4096, 8, 24, 12288, False), 12288),
    "chroma": Model("chroma", ONE_MEGAPIXEL, None, _shaped_entry(_chroma, 3072, 19, 38, T5_WIDTH), T5_WIDTH),
    "wan": Model("wan", VIDEO, None, _shaped_entry(_wan, 5120, 13824, 40, 0, T5_WIDTH), T5_WIDTH),
    "wan_1.3b": Model("wan", VIDEO, None, _shaped_entry(_wan, 1536, 8960, 30, 0, T5_WIDTH), T5_WIDTH),
    "qwen_image": Model(
        "qwen_image", Picture(1024, 1024, 128), None, _shaped_entry(_qwen_image, 24, 128, 60, 3584), 3584
    ),
    "sdxl": Model("sdxl", Picture(1024, 1024, 77), None, sdxl, 2048, 1280),
}
TINY: dict[str, Model] = {
    "flux": Model("flux", Picture(512, 512, 128), partial(tiny.write_flux, hidden=256, depth=2, depth_single=4)),
    "flux2_klein": Model(
        "flux2",
        Picture(512, 512, 512),
        partial(tiny.write_flux2, hidden=256, depth=2, depth_single=4, guidance=False),
    ),
    "chroma": Model("chroma", Picture(512, 512, 128), partial(tiny.write_chroma, hidden=256, depth=2, depth_single=4)),
    "wan": Model("wan", Picture(256, 256, 512, frames=13), partial(tiny.write_wan, dim=256, layers=4)),
    "qwen_image": Model("qwen_image", Picture(512, 512, 64), partial(tiny.write_qwen_image, heads=4, layers=4)),
    "sdxl": Model("sdxl", Picture(512, 512, 77), partial(tiny.write_sdxl, channels=64)),
}
MODELS = {"full": FULL, "tiny": TINY}

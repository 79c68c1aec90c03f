"""Inputs of a real step of a model at some size, as a sampler passes them, made without text encoder and VAE."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.sample
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ...models.catalogue.registry import usual_settings

Conditioning = list[list[Any]]


@dataclass(frozen=True)
class StepSize:
    """Size of a sampled step.

    width: pixels.
    height: pixels.
    batch: images at a time.
    frames: of a video.
    text_length: tokens of the prompt; 0 for the usual number of the model.
    cfg: 0 for the usual value of the model.
    """

    width: int
    height: int
    batch: int = 1
    frames: int = 1
    text_length: int = 0
    cfg: float = 0.0


# Names of the first layer that the text goes through, the most reliable first.
_TEXT_LAYERS = (
    "txt_in",
    "context_embedder",
    "text_embedding",
    "cap_embedder",
    "cond_seq_linear",
    "caption_projection",
    "caption_embedder",
    "text_embeddings",
    "text_proj",
    "condition_proj",
    "cond_in",
    "t5_yproj",
    "y_embedder",
)
# For models that attend to the text directly.
_TEXT_KEYS = ("attn2.to_k", "cross_attn.k_proj", "cross_attn.k")


@dataclass(frozen=True)
class StepInputs:
    """Arguments of `comfy.sample.sample`.

    noise: random noise in the shape of `latent`.
    latent: empty latent, (B, C, H, W) or (B, C, T, H, W).
    positive: conditioning of the prompt.
    negative: conditioning of the negative prompt.
    cfg: guidance scale.
    size: description for the user.
    prompt: the shapes of a connected prompt, else empty.
    """

    noise: Tensor
    latent: Tensor
    positive: Conditioning
    negative: Conditioning
    cfg: float
    size: str
    prompt: str

    def sample(self, patcher: ModelPatcher, steps: int) -> None:
        """Sample as core's KSampler does; the result is still noise."""
        extra = {"disable_pbar": True, "seed": 0}
        comfy.sample.sample(
            patcher, self.noise, steps, self.cfg, "euler", "simple", self.positive, self.negative, self.latent, **extra
        )


def step_inputs(patcher: ModelPatcher, size: StepSize, prompt: Conditioning | None = None) -> StepInputs:
    """Make the inputs of a step. prompt: conditioning for this model; without one, random text of the right width.
    Raises ValueError, in a sentence, for inputs that the model can't take."""
    usual = usual_settings(patcher.model)
    cfg = size.cfg or usual.cfg
    latent = _empty_latent(patcher, size)
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(latent.shape, generator=random)
    if prompt is not None:
        if not prompt or prompt[0][0] is None:
            raise ValueError("positive is empty; connect the conditioning of a prompt, or nothing.")
        negative = [[torch.zeros_like(text), dict(extra)] for text, extra in prompt]
        described = _describe(size, cfg, [prompt[0][0].shape[1]])
        return StepInputs(noise, latent, prompt, negative, cfg, described, str(_shapes(prompt)))
    text = size.text_length or usual.prompt_tokens
    negative_length = text if usual.negative_tokens is None else min(text, usual.negative_tokens)
    width, pooled = text_width(patcher.model), pooled_width(patcher.model)
    positive, negative = (_random_text(length, width, pooled, random) for length in (text, negative_length))
    described = _describe(size, cfg, [text] if cfg == 1.0 or negative_length == text else [text, negative_length])
    return StepInputs(noise, latent, positive, negative, cfg, described, "")


def text_width(base: nn.Module) -> int:
    """Return the features per text token that the model's first layer for text takes."""
    model: Any = base.diffusion_model
    for layer in _layers(model, _TEXT_LAYERS + _TEXT_KEYS):
        return int(layer.in_features)
    raise ValueError(
        f"Tune Compile doesn't know what text {type(base).__name__} takes; connect a prompt for it to positive."
    )


def _layers(model: nn.Module, names: Sequence[str]) -> Iterator[Any]:
    """Yield the modules with in_features among those of these names and below them, name by name."""
    for name in names:
        for path, module in model.named_modules():
            if hasattr(module, "in_features") and f".{name}." in f".{path}.":
                yield module


def pooled_width(base: Any) -> int:
    """Return the features of the pooled text that the model takes, 0 for none.

    That is its vector's width minus the model's own part of it, such as SDXL's image sizes.
    """
    config = base.model_config.unet_config
    vector_width = config.get("adm_in_channels") or config.get("vec_in_dim") or 0
    if not vector_width:
        return 0
    vector = base.encode_adm(pooled_output=torch.zeros(1, 1), width=64, height=64, device=torch.device("cpu"))
    return 0 if vector is None else max(0, vector_width - (vector.shape[1] - 1))


def _random_text(length: int, width: int, pooled: int, random: torch.Generator) -> Conditioning:
    extra = {"pooled_output": torch.randn(1, pooled, generator=random)} if pooled else {}
    return [[torch.randn(1, length, width, generator=random), extra]]


def _empty_latent(patcher: ModelPatcher, size: StepSize) -> Tensor:
    """Make the latent of core's empty latent node for this model."""
    latents = patcher.get_model_object("latent_format")
    if latents.latent_dimensions not in (2, 3):
        raise ValueError(
            f"model: Tune Compile measures models of pictures and videos, and {type(patcher.model).__name__} makes "
            "neither; connect another model, or use Compile Model."
        )
    cell = latents.spacial_downscale_ratio
    for name, pixels in (("width", size.width), ("height", size.height)):
        if pixels < 2 * cell:
            raise ValueError(f"{name} is {pixels}; this model needs {2 * cell} pixels at least.")
    shape = [size.batch, latents.latent_channels, size.height // cell, size.width // cell]
    if latents.latent_dimensions == 3:
        shape.insert(2, (size.frames - 1) // latents.temporal_downscale_ratio + 1)
    elif size.frames > 1:
        raise ValueError(f"frames is {size.frames}, but this model makes pictures; set it to 1.")
    return torch.zeros(shape)


def _describe(size: StepSize, cfg: float, lengths: list[int]) -> str:
    frames = f", {size.frames} frames" if size.frames > 1 else ""
    texts = " and ".join(map(str, lengths))
    return f"{size.width}x{size.height}{frames}, batch {size.batch}, {texts} text tokens, cfg {cfg:g}"


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {key: _shapes(inner) for key, inner in value.items()}
    return [_shapes(inner) for inner in value] if isinstance(value, list | tuple) else type(value).__name__

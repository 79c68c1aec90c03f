"""A row of the table of tiny models: one of ComfyUI's model classes with sizes that run in milliseconds."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
from torch import Tensor

PATCH = 2  # cells along a side of a token of the data; the model's own patch may be another
Draw = Callable[..., Tensor]
"""Called with a shape it gives normal numbers that follow from the sample's name."""


def nothing(draw: Draw) -> dict[str, Any]:
    """Return the conditioning of a model that takes text alone."""
    return {}


@dataclass(frozen=True, kw_only=True)
class NativeRow:
    """One model class of ComfyUI in a tiny size.

    name: how tests call it.
    model: the class of comfy.supported_models.
    tier: A, models that people train by name; B, every other distinct forward; –, one that does not train.
    unet: sizes that detection would read from a checkpoint; they override the class's own values.
    latent: (C, H, W) or (C, T, H, W) of a sample, as the VAE outputs it.
    text: (length, width) of a caption, as the text encoder outputs it.
    conditioning: makes the conditioning other than the text.
    batches: samples of one shape run as one batch; False if the model takes one at a time.
    audio: shape of the audio latent that goes with the latent, without its batch axis; None for pictures and videos.
    sizes: arguments of a class, by its dotted name, that ComfyUI fixes in its code.
    text_ids: the caption is a list of token numbers, given by `conditioning`, and the model ignores the text tensor.
    left_out: axis of the tests, training or compiling → why it is left out.
    """

    name: str
    model: str
    tier: str
    unet: Mapping[str, Any]
    latent: tuple[int, ...]
    text: tuple[int, int]
    conditioning: Callable[[Draw], dict[str, Any]] = nothing
    batches: bool = True
    audio: tuple[int, ...] | None = None
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    text_ids: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def build(
    row: NativeRow, dtype: torch.dtype = torch.float32, seed: int = 0, quantised: Mapping[str, Tensor] | None = None
) -> Any:
    """Make the MODEL under inference mode, as loaders do: every weight is an inference tensor, filled by its name.

    quantised: all tensors of a quantised file, in place of random ones.
    """
    import comfy.model_patcher
    import comfy.supported_models

    kind = getattr(comfy.supported_models, row.model)
    sizes = {**kind.unet_config, **row.unet}
    with torch.inference_mode(), _small(row.sizes):
        config = kind(sizes)
        config.unet_config.update(row.unet)
        narrow = quantised is not None or dtype.itemsize == 1
        config.set_inference_dtype(dtype, torch.float32 if narrow else None)
        config.quant_config = None if quantised is None else {"mixed_ops": True}
        model = config.get_model({}, "", device=torch.device("cpu"))
        if quantised is not None:
            model.diffusion_model.load_state_dict(quantised)
        else:
            for name, value in model.diffusion_model.state_dict().items():
                if value.is_floating_point() and value.numel():
                    value.copy_(_weight(name, tuple(value.shape), seed))
    cpu = torch.device("cpu")
    patcher = comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)
    patcher.cached_patcher_init = (build, (row, dtype, seed, quantised))
    return patcher


def _weight(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Matrices have variance 1 / fan-in, so that activations stay near one; norms are around 1, biases around 0."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(crc32(f"{seed}:{name}".encode())))
    if name.endswith("bias"):
        return 0.1 * value
    if value.ndim < 2:
        return 1 + 0.1 * value
    return value / max(value[0].numel(), 1) ** 0.5


@contextmanager
def _small(sizes: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    if not sizes:
        yield
        return
    (dotted, arguments), *rest = sizes.items()
    module, name = dotted.rsplit(".", 1)
    kind = getattr(import_module(module), name)
    with patch(dotted, lambda *args, **kwargs: kind(*args, **{**kwargs, **arguments})), _small(dict(rest)):
        yield


def source_of(name: str) -> Draw:
    """Return the source of a sample's numbers, which follow from its name alone."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return lambda *shape: torch.randn(*shape, generator=generator)


def sample_of(row: NativeRow, name: str = "a sample", text_length: int | None = None) -> Any:
    """Make a Sample of the row whose tensors follow from its name; `text_length` in place of the row's."""
    from tessera.data.samples import Sample, SampleTensors

    draw = source_of(name)
    length = text_length or row.text[0]
    conditioning = row.conditioning(draw)
    if (mask := conditioning.get("attention_mask")) is not None:
        padding = torch.ones(1, max(0, length - mask.shape[1]), dtype=torch.long)
        conditioning["attention_mask"] = torch.cat([padding, mask[:, -length:]], dim=1)
    tensors = SampleTensors(draw(*row.latent), draw(1, length, row.text[1]), conditioning)
    frames = row.latent[1] if len(row.latent) == 4 else 1
    height, width = row.latent[-2:]
    grid = (frames, height, width)
    return Sample(name, grid, frames * height * width, length, lambda *_: tensors, conditioning=frozenset(conditioning))


def data_of(row: NativeRow, count: int = 2) -> Any:
    """Make TrainingData of `count` samples of one shape."""
    from tessera.data.samples import TrainingData

    return TrainingData(tuple(sample_of(row, f"{row.name} {i}") for i in range(count)), f"{row.name} {count}")


def core_conds(
    model: Any, row: NativeRow, sample: Any, noisy: Tensor, guidance: float | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """Make the arguments of `apply_model` as core's sampler does: the noisy latent, with its audio, and the conditions.

    noisy: (1, C, …), or (1, 1, n) with the audio packed behind it.
    """
    import comfy.utils

    read, cpu = sample.load(), torch.device("cpu")
    conditioning = dict(read.conditioning) | ({} if guidance is None else {"guidance": guidance})
    if row.audio is not None:
        conditioning["latent_shapes"] = [torch.Size((1, *row.latent)), torch.Size((1, *row.audio))]
        if noisy.ndim != 3:
            noisy, _ = comfy.utils.pack_latents([noisy, source_of(f"{sample.name} audio")(1, *row.audio)])
    if noisy.ndim > 3:
        conditioning = {
            "width": noisy.shape[3] * 8,
            "height": noisy.shape[2] * 8,
            "prompt_type": "positive",
        } | conditioning
    conds = model.extra_conds(cross_attn=read.text, noise=noisy, device=cpu, **conditioning)
    return noisy, {name: cond.process_cond(batch_size=1, area=None, device=cpu).cond for name, cond in conds.items()}


def core_forward(patcher: Any, row: NativeRow, sample: Any, sigma: float, x: Tensor | None = None) -> Tensor:
    """Run ComfyUI's own `extra_conds` and `apply_model` of one sample under no_grad, as its sampler does; return the
    predicted clean latent, (C, …) in its own space.

    x: (C, …) noisy latent in the model's space; the sample's latent if it is None.
    """
    model = patcher.model
    latent = (model.process_latent_in(sample.load().latent[None]) if x is None else x[None]).clone()
    with torch.no_grad():
        noisy, conds = core_conds(model, row, sample, latent)
        level = torch.tensor([sigma])
        options = {"sigmas": level, "sample_sigmas": torch.tensor([sigma, 0.0]), "cond_or_uncond": [0]}
        denoised = model.apply_model(noisy, level, transformer_options=options, **conds)
    return denoised.flatten()[: latent.numel()].view(latent.shape)[0]

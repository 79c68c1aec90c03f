"""Sampling of images and videos, equal to ComfyUI's nodes Load LoRA, KSampler and VAE Decode."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import comfy.sample
import comfy.samplers
import comfy.sd
import numpy as np
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...common.core import end_of_node
from ...lora.files.fit import fitting_patches
from ...lora.files.reader import read_patches
from ...models.catalogue.registry import model_latents, names_of_model, related_family
from .latents import check_latent, check_latent_fits, empty_latent, pictures_of

Conditioning = list[list[Any]]
MOST_SEED = 0xFFFFFFFFFFFFFFFF


def _nothing() -> None:
    return


@dataclass(frozen=True, eq=False)
class Sampling:
    """Prompt and sampling settings; sampled once for each seed.

    vae: VAE to decode with.
    positive: positive conditioning.
    negative: negative conditioning; None takes the positive one with its text zeroed.
    width: pixels.
    height: pixels.
    frames: frames of a video, 1 is an image.
    steps: sampler steps.
    cfg: guidance scale.
    sampler_name: name of a KSampler sampler.
    scheduler: name of a KSampler scheduler.
    seed: first seed.
    seeds: number of consecutive seeds.
    latent_image: core's LATENT of batch size 1; replaces width, height and frames.
    label: title on sheets, empty for the prompt's number.
    fps: frames per second of a video file.
    """

    vae: Any
    positive: Conditioning
    negative: Conditioning | None = None
    width: int = 1024
    height: int = 1024
    frames: int = 1
    steps: int = 20
    cfg: float = 1.0
    sampler_name: str = "euler"
    scheduler: str = "simple"
    seed: int = 0
    seeds: int = 1
    latent_image: Mapping[str, Any] | None = None
    label: str = ""
    fps: float = 16.0

    def __post_init__(self) -> None:
        for name in ("width", "height", "frames", "steps", "seeds"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value}; set it to 1 or more.")
        if self.fps <= 0:
            raise ValueError(f"fps is {self.fps:g}; set it above 0.")
        if self.sampler_name not in comfy.samplers.KSampler.SAMPLERS:
            raise ValueError(f"sampler_name is {self.sampler_name!r}, which this ComfyUI does not have.")
        if self.scheduler not in comfy.samplers.KSampler.SCHEDULERS:
            raise ValueError(f"scheduler is {self.scheduler!r}, which this ComfyUI does not have.")
        if self.latent_image is not None:
            check_latent(self.latent_image)

    def all_seeds(self) -> list[int]:
        """List the seeds to sample; they wrap around after MOST_SEED."""
        return [(self.seed + i) % (MOST_SEED + 1) for i in range(self.seeds)]

    def facts(self) -> dict[str, Any]:
        """Return the settings as plain numbers and strings, without the seed."""
        size = None if self.latent_image is None else list(pictures_of(self.latent_image["samples"]).shape)
        return {
            **({"width": self.width, "height": self.height, "frames": self.frames} if size is None else {}),
            **({"latent_image": size} if size is not None else {}),
            "steps": self.steps,
            "cfg": self.cfg,
            "sampler_name": self.sampler_name,
            "scheduler": self.scheduler,
        }


def titled(samplings: Sequence[Sampling]) -> list[tuple[str, Sampling, int]]:
    """List (title, prompt, seed) for every prompt with each of its seeds: the rows of a sheet."""
    labels = [sampling.label or f"prompt {number}" for number, sampling in enumerate(samplings, 1)]
    pairs = zip(labels, samplings, strict=True)
    return [(f"{label}, seed {seed}", sampling, seed) for label, sampling in pairs for seed in sampling.all_seeds()]


@dataclass(frozen=True, eq=False)
class Stages:
    """Model to sample with, or the two experts of Wan 2.2.

    model: the only model, or the high noise expert, which makes the steps that begin at or above the boundary.
    low_noise: the low noise expert, None for a single model.
    boundary: sigma between the experts.
    switch_step: number of steps of the high noise expert, in place of the boundary; 0 is off.
    """

    model: ModelPatcher
    low_noise: ModelPatcher | None = None
    boundary: float = 0.0
    switch_step: int = 0

    def first_steps(self, sampling: Sampling) -> int:
        """Count the steps that `model` makes."""
        if self.low_noise is None:
            return sampling.steps
        if self.switch_step:
            return min(self.switch_step, sampling.steps)
        model = self.model
        sampler = comfy.samplers.KSampler(
            model,
            sampling.steps,
            model.load_device,
            sampling.sampler_name,
            sampling.scheduler,
            1.0,
            model.model_options,
        )
        return int((sampler.sigmas[:-1] >= self.boundary).sum())


def with_lora(model: ModelPatcher, lora: Mapping[str, Tensor], strength: float = 1.0) -> tuple[ModelPatcher, int]:
    """Clone the MODEL with the LoRA on it, like Load LoRA. Returns the clone and the number of weights it changes.

    Raises DoesNotFit if an update is incomplete, unknown or of another shape than its layer.
    """
    read = read_patches(lora, names_of_model(model.model), model.model)
    clone = model.clone()
    changed: set[Any] = set()
    for group in fitting_patches(read, model.model)[0]:
        changed.update(clone.add_patches(group, strength))
    return clone, len(changed)


def check_fits(sampling: Sampling, model: ModelPatcher) -> None:
    """Raise ValueError if the VAE or the latent belongs to another model, or the model does not take the size."""
    policy, vae = model_latents(model.model), sampling.vae
    if (channels := getattr(vae, "latent_channels", None)) not in (None, policy.channels):
        raise ValueError(
            f"vae decodes latents of {channels} channels and the model makes {policy.channels}; connect the model's "
            "own VAE."
        )
    if sampling.latent_image is not None:
        check_latent_fits(sampling.latent_image, model)
        return
    cell = policy.pixels_per_latent
    for name in ("width", "height"):
        if (value := getattr(sampling, name)) % cell:
            low = max(cell, value - value % cell)
            raise ValueError(f"{name} is {value}; the model takes multiples of {cell}, such as {low}.")
    family = related_family(model.model)
    pictures_only = not policy.makes_video or (family is not None and family.pictures_only)
    if sampling.frames > 1 and pictures_only:
        raise ValueError(f"frames is {sampling.frames}, but the model makes pictures; set it to 1.")
    if (whole := policy.whole_frames(sampling.frames)) != sampling.frames:
        larger_count = next(number for number in count(sampling.frames) if policy.whole_frames(number) == number)
        raise ValueError(
            f"frames is {sampling.frames}, which the model does not take; set it to {whole} or {larger_count}."
        )


def check_text(sampling: Sampling, width: int, number: int) -> None:
    """Raise ValueError if the prompt's text embedding does not have the width `width` of the model, if known."""
    for name, conditioning in (("positive", sampling.positive), ("negative", sampling.negative or [])):
        other = next((text.shape[-1] for text, _ in conditioning if text.shape[-1] != width), None)
        if width and other:
            raise ValueError(
                f"{name} of prompt {number} has text of width {other} and the model takes {width}; encode it with the "
                "model's own text encoders."
            )


def sample_latent(stages: Stages, sampling: Sampling, seed: int, tell: Callable[[], None]) -> Tensor:
    """Sample a latent, (1, C, …), like KSampler, or like two KSampler (Advanced) that share the steps.

    tell: called after each step; may raise.

    Call it under inference mode, as nodes run.
    """
    return sample_latents(stages, [(sampling, seed)], tell)[0]


def sample_latents(
    stages: Stages, rows: Sequence[tuple[Sampling, int]], tell: Callable[[], None], check: Callable[[], None] = _nothing
) -> list[Tensor]:
    """Sample a latent, (1, C, …), for each (prompt, seed); for a model that also makes sound, that of the video.

    The high noise expert makes its steps for all rows before the low noise expert is loaded, so that each is loaded
    once.

    tell: called after each step; may raise.
    check: called before each row of each expert; may raise.
    """
    first_steps = [stages.first_steps(sampling) for sampling, _ in rows]
    latents: list[Any] = []
    for (sampling, seed), steps in zip(rows, first_steps, strict=True):
        check()
        whole = steps in (0, sampling.steps)
        model = stages.model if steps else stages.low_noise
        assert model is not None
        part = {} if whole else {"start_step": 0, "last_step": steps, "force_full_denoise": False}
        latents.append(_sampled(model, sampling, seed, None, tell, part))
    for row, ((sampling, seed), steps) in enumerate(zip(rows, first_steps, strict=True)):
        if steps in (0, sampling.steps) or stages.low_noise is None:
            continue
        check()
        part = {"start_step": steps, "last_step": sampling.steps, "force_full_denoise": True, "disable_noise": True}
        latents[row] = _sampled(stages.low_noise, sampling, seed, latents[row], tell, part)
    return [pictures_of(latent) for latent in latents]


def _sampled(
    model: ModelPatcher,
    sampling: Sampling,
    seed: int,
    half: Any,
    tell: Callable[[], None],
    part: Mapping[str, Any],
) -> Any:
    """Run core's sampler. Returns a latent, nested if the one that it starts from is.

    half: latent after the first expert's steps, None to start from noise.
    part: range of steps, as keyword arguments of core's sampler.
    """
    latent = dict(sampling.latent_image or _empty_latent(model, sampling))
    if half is None:
        samples = comfy.sample.fix_empty_latent_channels(
            model, latent["samples"], latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal")
        )
        noise = comfy.sample.prepare_noise(samples, seed, latent.get("batch_index"))
    else:
        samples, noise = half, torch.zeros(half.shape, dtype=half.dtype)
    try:
        return comfy.sample.sample(
            model,
            noise,
            sampling.steps,
            sampling.cfg,
            sampling.sampler_name,
            sampling.scheduler,
            sampling.positive,
            sampling.negative if sampling.negative is not None else zeroed(sampling.positive),
            samples,
            noise_mask=latent.get("noise_mask"),
            callback=lambda *_: tell(),
            disable_pbar=True,
            seed=seed,
            **part,
        )
    finally:
        end_of_node()


def _empty_latent(model: ModelPatcher, sampling: Sampling) -> dict[str, Any]:
    frame_rates = (extra["frame_rate"] for _, extra in sampling.positive if "frame_rate" in extra)
    return empty_latent(model, sampling.width, sampling.height, sampling.frames, next(frame_rates, None))


def zeroed(conditioning: Conditioning) -> Conditioning:
    """Zero the text and the pooled output, like Conditioning Zero Out."""
    return [
        [
            torch.zeros_like(text),
            {k: torch.zeros_like(v) if k == "pooled_output" and v is not None else v for k, v in extra.items()},
        ]
        for text, extra in conditioning
    ]


def decode(vae: Any, latent: Tensor) -> Tensor:
    """Decode a latent like VAE Decode: (frames, H, W, 3), 0 to 1."""
    try:
        pictures = vae.decode(latent)
    finally:
        end_of_node()
    return pictures.reshape(-1, *pictures.shape[-3:])


@contextmanager
def preserve_random_state(device: torch.device) -> Iterator[None]:
    """Restore after the context the global random states of Python, NumPy and torch, which ComfyUI's sampler seeds."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)

"""Conversion of a batch to the inputs of ComfyUI's own forward."""

import copy
import math
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ....memory.host.to_device import to_device
from ...conditioning import model_conditioning
from ...family import ModelInputs, NoisySample, Patches
from ..comfyui.leftovers import as_loaded
from ..facts.model_facts import Sound


@dataclass(frozen=True)
class NativeGroup:
    """Samples that run in one forward: their tensors have the same shapes, their plain values are equal.

    rows: their indices in the batch.
    x: (b, C, H, W) or (b, C, T, H, W), in the model's space.
    sigma: (b,), the model's own.
    conds: the arguments of `apply_model`: tensors (b, …), lists of them, and plain values.
    shape: of one sample's latent; x with sound packed after it is (b, 1, n).
    text_options: arguments of the model's `preprocess_text_embeds` besides the text, which is not processed yet; None
        if it is not used.
    batched: `conds` with True in place of each tensor that has a batch axis, and False for any other.
    """

    rows: tuple[int, ...]
    x: Tensor
    sigma: Tensor
    conds: Mapping[str, Any]
    shape: tuple[int, ...]
    text_options: Mapping[str, Any] | None = None
    batched: Mapping[str, Any] = field(default_factory=dict)

    def sampler_options(self) -> dict[str, Any]:
        """Make the `transformer_options` that ComfyUI's sampler sets for every model.

        The schedule in `sample_sigmas` holds each sigma twice. A mean flow, HunyuanImage 2.1 Distilled, reads the next
        sigma: over a step of zero length the mean velocity is the velocity, as the loss requires.
        """
        schedule = self.sigma.sort(descending=True).values.repeat_interleave(2)
        rows = len(self.rows)
        return {
            "sigmas": self.sigma,
            "sample_sigmas": schedule,
            "cond_or_uncond": [0] * rows,
            "uuids": [uuid.uuid4() for _ in range(rows)],
        }

    def split(self) -> list["NativeGroup"]:
        """Return each sample as a separate group."""
        return [self._row(index) for index in range(len(self.rows))]

    def paired(self) -> tuple["NativeGroup", "NativeGroup", "NativeGroup"]:
        """Return three pairs: the first sample twice, with another of the same shapes, and the other twice. The other
        has another latent, sigma and caption."""
        first = self._row(0)
        other = replace(
            first,
            x=0.5 * first.x.flip(-1),
            sigma=0.5 * first.sigma,
            conds={name: _map_tensors(value, _altered) for name, value in first.conds.items()},
        )
        return first.beside(first), first.beside(other), other.beside(other)

    def beside(self, other: "NativeGroup") -> "NativeGroup":
        """Batch this sample with another of the same shapes."""
        conds = {name: _beside(value, other.conds[name], self.batched[name]) for name, value in self.conds.items()}
        x, sigma = torch.cat([self.x, other.x]), torch.cat([self.sigma, other.sigma])
        return replace(self, rows=(0, 1), x=x, sigma=sigma, conds=conds)

    def _row(self, index: int) -> "NativeGroup":
        row = slice(index, index + 1)
        conds = {name: _sliced(value, self.batched[name], row) for name, value in self.conds.items()}
        return replace(self, rows=self.rows[row], x=self.x[row], sigma=self.sigma[row], conds=conds)

    def pictures(self, out: Tensor) -> Tensor:
        """Cut the sound off the forward's output for one sample."""
        return out.flatten()[: math.prod(self.shape)].view(self.shape)

    def copied(self) -> "NativeGroup":
        """Return a copy with cloned tensors: ComfyUI's forward may write into them."""
        conds = {name: _map_tensors(value, Tensor.clone) for name, value in self.conds.items()}
        return replace(self, x=self.x.clone(), sigma=self.sigma.clone(), conds=conds)

    def cast(self, dtype: torch.dtype) -> "NativeGroup":
        """Return a copy with its 16-bit tensors in `dtype`."""

        def wider(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

        return replace(
            self, x=wider(self.x), conds={name: _map_tensors(value, wider) for name, value in self.conds.items()}
        )

    def to(self, device: torch.device) -> "NativeGroup":
        conds = {
            name: _map_tensors(value, lambda tensor: to_device(tensor, device)) for name, value in self.conds.items()
        }
        return replace(self, x=to_device(self.x, device), sigma=to_device(self.sigma, device), conds=conds)


@dataclass(frozen=True, kw_only=True)
class NativeInputs(ModelInputs):
    """groups: run one after the other; together they hold each sample of the batch once. The forward reads only the
    lengths of tokens and text."""

    groups: tuple[NativeGroup, ...]

    def to(self, device: torch.device) -> "NativeInputs":
        inputs = super().to(device)
        assert isinstance(inputs, NativeInputs)
        return replace(inputs, groups=tuple(group.to(device) for group in self.groups))


def native_inputs(
    patcher: ModelPatcher,
    samples: Sequence[NoisySample],
    sigma: Tensor,
    guidance: float | None,
    sound: Sound | None = None,
    batches: bool = True,
) -> NativeInputs:
    """Group the samples by the shapes of their `extra_conds`.

    guidance: None keeps that of each conditioning.
    sound: for models that make it along with the video. Its latent is silence, zeros, at its own noise level.
    batches: False runs each sample by itself.
    """
    device = sigma.device
    model, adapter = _with_text_as_encoded(as_loaded(patcher.model))
    by_signature: dict[Any, list[tuple[int, Tensor, dict[str, Any]]]] = {}
    options: dict[Any, Mapping[str, Any] | None] = {}
    for row, sample in enumerate(samples):
        x = sample.latent
        # As set by core's sampler: SDXL embeds the size, at 8 pixels per cell whatever the VAE.
        size = {"width": x[None].shape[3] * 8, "height": x[None].shape[2] * 8, "prompt_type": "positive"}
        # CLIP Text Encode sets a pooled text on each caption, None if the encoder has none.
        conditioning = {"pooled_output": None, **size, **sample.conditioning}
        if patcher.model.concat_keys:
            # The latent that a sampler starts from: by default an empty one, as for text to image.
            conditioning = {"latent_image": torch.zeros_like(x)[None], **conditioning}
        if sound is not None:
            shape = sound.shape(x.shape[1], conditioning.get("frame_rate"))
            silent = _noised_silence(x, shape, sound.sigma(float(sigma[row])))
            packed, shapes = comfy.utils.pack_latents([x[None], silent[None]])
            x, conditioning = packed[0], {"latent_shapes": shapes, **conditioning}
        adapter.forget()
        conds = model_conditioning(model, x, sample.text, conditioning, guidance, device, lists=None)
        key = row if not batches else (_signature(sample.latent, conds), repr(adapter.options))
        options[key] = adapter.options
        by_signature.setdefault(key, []).append((row, x, conds))
    groups = []
    for key, members in by_signature.items():
        rows = tuple(row for row, _, _ in members)
        conds = {name: _batched([member_conds[name] for _, _, member_conds in members]) for name in members[0][2]}
        batched = {name: _map_tensors(value, _has_batch) for name, value in members[0][2].items()}
        x = torch.stack([x for _, x, _ in members])
        shape = tuple(samples[rows[0]].latent.shape)
        groups.append(NativeGroup(rows, x, sigma[list(rows)], conds, shape, options[key], batched))
    length = max(sample.text_length for sample in samples)
    return NativeInputs(
        tokens=torch.zeros(len(samples), samples[0].tokens, 0, device=device),
        text=torch.zeros(len(samples), length, 0, device=device),
        timestep=sigma,
        groups=tuple(groups),
    )


class _LaterAdapter:
    """Replaces a model's `preprocess_text_embeds` while `extra_conds` runs: the text stays as encoded.

    options: the last call's arguments besides the text; None without a call.
    """

    def __init__(self) -> None:
        self.options: dict[str, Any] | None = None

    def forget(self) -> None:
        """Forget the last call."""
        self.options = None

    def __call__(self, text: Tensor, **options: Any) -> Tensor:
        # In cached data a flag is a tensor without axes.
        self.options = {name: v.item() if isinstance(v, Tensor) else v for name, v in options.items()}
        return text


def _with_text_as_encoded(model: Any) -> tuple[Any, _LaterAdapter]:
    """Copy the model so that its `extra_conds` leaves the text to the training forward.

    LTX-2 and MiniMax H3 refine the text there once per sampler run: with the MODEL's unpatched weights on their current
    device, and without a gradient for targets among them.
    """
    adapter = _LaterAdapter()
    if not hasattr(model.diffusion_model, "preprocess_text_embeds"):
        return model, adapter
    inner, outer = copy.copy(model.diffusion_model), copy.copy(model)
    vars(inner)["preprocess_text_embeds"] = adapter
    outer._modules = {**model._modules, "diffusion_model": inner}
    return outer, adapter


def _noised_silence(x: Tensor, shape: tuple[int, ...], sigma: float) -> Tensor:
    """Make noise at this level, the same for the same noisy latent, and so for the same seed, step and sample."""
    seed = zlib.crc32(x.detach().cpu().contiguous().numpy().tobytes())
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (sigma * noise).to(x.device, x.dtype)


def patch_of(latent: Tensor, tokens: int) -> int:
    """Return the cells along a side of one token of the data's grid. latent: (C, H, W) or (C, T, H, W)."""
    cells = math.prod(latent.shape[1:])
    patch = math.isqrt(cells // tokens)
    assert patch * patch * tokens == cells, (latent.shape, tokens)
    return patch


def patchify(latent: Tensor, keep: int) -> Patches:
    """Cut a latent (C, H, W) or (C, T, H, W) into tokens, frame after frame in row order, with their positions."""
    patch = patch_of(latent, keep)
    frames = latent if latent.ndim == 4 else latent[:, None]
    channels, count, height, width = frames.shape
    h, w = height // patch, width // patch
    cut = frames.reshape(channels, count, h, patch, w, patch).permute(1, 2, 4, 0, 3, 5)
    axes = [torch.arange(n, device=latent.device) for n in (count, h, w)]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(keep, 3)
    return Patches(cut.reshape(keep, channels * patch * patch), grid)


def _map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Apply a function to the tensors of a conditioning."""
    if isinstance(value, Tensor):
        return change(value)
    return [_map_tensors(inner, change) for inner in value] if isinstance(value, list) else value


def _altered(tensor: Tensor) -> Tensor:
    return 0.5 * tensor.flip(-1) if tensor.is_floating_point() and tensor.ndim > 0 else tensor


def _sliced(value: Any, batched: Any, rows: slice) -> Any:
    if isinstance(value, list):
        return [_sliced(inner, flag, rows) for inner, flag in zip(value, batched, strict=True)]
    return value[rows] if batched is True else value


def _beside(value: Any, other: Any, batched: Any) -> Any:
    if isinstance(value, list):
        return [_beside(*entries) for entries in zip(value, other, batched, strict=True)]
    return torch.cat([value, other]) if batched is True else value


def _signature(latent: Tensor, conds: Mapping[str, Any]) -> Any:
    """Return a key that is equal for samples that can share one forward."""
    return tuple(latent.shape), tuple((name, _signature_of(value)) for name, value in sorted(conds.items()))


def _signature_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        # A tensor without a batch axis is a constant of the forward.
        return (tuple(value.shape), str(value.dtype)) if _has_batch(value) else repr(value.tolist())
    return tuple(map(_signature_of, value)) if isinstance(value, list) else repr(value)


def _has_batch(value: Tensor) -> bool:
    return value.ndim > 0 and value.shape[0] == 1


def _batched(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(list(values)) if _has_batch(first) else first
    if isinstance(first, list):
        return [_batched(together) for together in zip(*values, strict=True)]
    return first

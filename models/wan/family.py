"""The Wan family: 2.1 and 2.2, text to video and image to video, 14B, 5B and 1.3B."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import comfy.ldm.wan.model
import comfy.model_base
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor
from torch.nn import functional as F

from ...memory.weights.frozen import FrozenWeights
from ..conditioning import model_conditioning, padded_texts
from ..family import (
    ConditioningFacts,
    Family,
    NoisySample,
    Origin,
    OwnForward,
    Patches,
    SampleFacts,
    SamplingFacts,
    UsualSettings,
)
from ..latents import WAN21, WAN22, LatentPolicy
from ..text import uncut_note
from .layers import PATCH
from .names import WAN_NAMES
from .text import TEXT_LENGTH, WanText
from .transformer import WanInputs, WanTransformer

START_PICTURE = "concat_latent_image"
TITLES = {
    "2.1-t2v": "Wan T2V",
    "2.1-i2v": "Wan 2.1 I2V",
    "2.2-i2v-14b": "Wan 2.2 I2V 14B",
    "2.2-5b": "Wan 2.2 5B",
}
# (class, input channels, has CLIP vision's embedding) → variant. Fun-Control and similar models take more channels.
_VARIANTS = {
    (comfy.model_base.WAN21, 16, False): "2.1-t2v",
    (comfy.model_base.WAN21, 36, True): "2.1-i2v",
    (comfy.model_base.WAN21, 36, False): "2.2-i2v-14b",
    (comfy.model_base.WAN22, 48, False): "2.2-5b",
}
# Outputs of `extra_conds` that this forward supports. Models without weights for CLIP vision's states ignore them, as
# in core.
_TAKEN = {"c_crossattn", "c_concat", "clip_fea"}


def _variant(model: Any) -> str | None:
    core = getattr(model, "diffusion_model", None)
    if type(model) not in (comfy.model_base.WAN21, comfy.model_base.WAN22) or core is None:
        return None
    usual = core.ref_conv is None and core.qk_norm and core.cross_attn_norm and tuple(core.patch_size) == (1, 2, 2)
    return _VARIANTS.get((type(model), core.in_dim, core.img_emb is not None)) if usual else None


def _is_5b(model: Any) -> bool:
    return type(model) is comfy.model_base.WAN22


class WanSampling(SamplingFacts):
    """Latents of the 5B are those of Wan 2.2's VAE; the 14B models of 2.2 are pairs of experts."""

    def latents(self, model: Any) -> LatentPolicy:
        return WAN22 if _is_5b(model) else WAN21

    def expert_boundary(self, model: Any) -> float | None:
        """Return `boundary` of Wan-Video/Wan2.2, wan/configs/wan_t2v_A14B.py and wan_i2v_A14B.py."""
        return {"2.1-t2v": 0.875, "2.2-i2v-14b": 0.9}.get(_variant(model) or "")


class WanConditioning(ConditioningFacts):
    def text_width(self, model: Any) -> int:
        return model.diffusion_model.text_embedding[0].in_features

    def vision_width(self, model: Any) -> int:
        image = model.diffusion_model.img_emb
        return 0 if image is None else image.proj[0].normalized_shape[0]


class WanForward(OwnForward):
    """Forward of Wan, whose start picture is concatenated to the latent, or its first frame without noise."""

    def transformer(self, model: Any, weights: FrozenWeights, attention: Any) -> WanTransformer:
        return WanTransformer(weights, model.diffusion_model, attention, _is_5b(model))

    def inputs(
        self, patcher: ModelPatcher, samples: Sequence[NoisySample], sigma: Tensor, guidance: float
    ) -> WanInputs:
        model, device = patcher.model, sigma.device
        dtype = model.get_dtype_inference()
        patches = []
        texts = []
        images = []
        for sample in samples:
            conditioning = _spared(sample.conditioning)
            cond = model_conditioning(model, sample.latent, sample.text, conditioning, guidance, device)
            if unknown := sorted(cond.keys() - _TAKEN):
                raise ValueError(f"positive carries {unknown[0]}, which Wan training does not take; remove it.")
            patches.append(
                self.patchify(_with_start_picture(sample.latent.to(dtype), cond.get("c_concat")), sample.tokens)
            )
            texts.append(_with_zeros(cond["c_crossattn"], sample.text_length))
            images.append(cond.get("clip_fea"))
        positions = torch.stack([p.positions for p in patches])
        timestep = patcher.get_model_object("model_sampling").timestep(sigma).float()[:, None]
        clean = None
        if _is_5b(model):
            # Always both timesteps, so that samples with and without clean frames share one graph.
            frames = torch.tensor([sample.clean_frames for sample in samples], device=device)
            clean = positions[..., :1] < frames[:, None, None]
            timestep = torch.cat((timestep, torch.zeros_like(timestep)), dim=1)
        length = samples[0].text_length
        text, text_mask = padded_texts(texts, length, self.text.masks(length))
        return WanInputs(
            tokens=torch.stack([p.tokens for p in patches]),
            positions=positions,
            text=text,
            text_mask=text_mask,
            timestep=timestep,
            image=_joined(images) if model.diffusion_model.img_emb is not None else None,
            clean=clean,
        )

    def as_core_takes(self, sample: NoisySample) -> NoisySample:
        """Pad the text with zeros to the length of core's encoder output, and mask the clean frames."""
        text = _with_zeros(sample.text, sample.text_length)
        conditioning = dict(_spared(sample.conditioning))
        if sample.clean_frames:
            mask = torch.ones(1, 1, *sample.latent.shape[1:])
            mask[:, :, : sample.clean_frames] = 0
            conditioning["denoise_mask"] = mask
        return replace(sample, text=text, conditioning=conditioning)

    def patchify(self, latent: Tensor, keep: int) -> Patches:
        """Cut a latent (C, T, H, W) with even H and W into the first keep / T tokens of each frame, in row order with
        channels last as the head writes them, with their positions."""
        channels, frames, height, width = latent.shape
        h = height // PATCH
        w = width // PATCH
        tokens_per_frame = keep // frames
        patches = latent.reshape(channels, frames, h, PATCH, w, PATCH).permute(1, 2, 4, 3, 5, 0)
        tokens = patches.reshape(frames, h * w, PATCH * PATCH * channels)[:, :tokens_per_frame].reshape(keep, -1)
        # Core counts positions in the dtype of the latent.
        axes = [torch.linspace(0, n - 1, steps=n, dtype=latent.dtype, device=latent.device) for n in (frames, h, w)]
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).float()
        return Patches(tokens, grid.reshape(frames, h * w, 3)[:, :tokens_per_frame].reshape(keep, 3))


class Wan(Family):
    """Wan 2.1 and 2.2. Models with more inputs than a start picture (VACE, Fun-Control, S2V, Animate) run another
    forward and are other families."""

    name = "wan"
    title = "Wan 2.1 and 2.2"
    releases = "text and image to video, 5B"
    model_class = comfy.model_base.WAN21
    transformer_class = comfy.ldm.wan.model.WanModel
    text = WanText()
    names = WAN_NAMES
    # Learning rate: musubi-tuner, docs/wan.md.
    usual = UsualSettings(learning_rate=2e-4, file_names=r"(^|[^a-z])wan", prompt_tokens=TEXT_LENGTH, cfg=5.0)
    # Attention and MLP of every block, like musubi-tuner's networks/lora_wan.py.
    default_targets = ("blocks.*.self_attn.*", "blocks.*.cross_attn.*", "blocks.*.ffn.*")
    # Shift: musubi-tuner's docs/wan.md trains with `--timestep_sampling shift --discrete_flow_shift 3.0`, which shifts
    # sigmas of a logistic normal, as here.
    sampling = WanSampling(WAN21, 3.0)
    conditioning = WanConditioning(text)
    forward = WanForward(title, ("blocks",), text)

    def matches(self, model: Any) -> bool:
        return _variant(model) is not None

    def variant(self, model: Any) -> str:
        """Return `2.1-t2v`, `2.1-i2v`, `2.2-i2v-14b` or `2.2-5b`. The experts of Wan 2.2 T2V have the shapes of Wan 2.1
        T2V, and nothing in a file distinguishes them: they are `2.1-t2v` too."""
        variant = _variant(model)
        assert variant is not None, type(model)
        return variant

    def origin(self, model: Any) -> Origin:
        """Return the origin as musubi-tuner names it (utils/sai_model_spec.py), which uses wan2.1 for the 14B models of
        2.2 too and does not train the 5B."""
        version = "2.2" if _is_5b(model) else "2.1"
        return Origin(f"wan{version}", f"https://github.com/Wan-Video/Wan{version}", "wan", "networks.lora_wan")

    def check(self, model: Any, sample: SampleFacts) -> None:
        variant = self.variant(model)
        name = sample.name
        title = TITLES[variant]
        conditioning = sample.conditioning
        if sample.references or "reference_latents" in conditioning:
            raise ValueError(f"{name} has reference pictures, which {title} does not take; prepare the data without.")
        if variant.endswith("t2v") or variant == "2.2-5b":
            if START_PICTURE in conditioning:
                raise ValueError(
                    f"{name} has a start picture, which {title} has no input for; prepare the data with image_to_video "
                    "switched off and the model's own VAE, or connect an image-to-video model."
                )
        elif START_PICTURE not in conditioning:
            raise ValueError(
                f"{name} has no start picture and {title} never runs without one; switch image_to_video on in Prepare "
                "Dataset, or connect a text-to-video model."
            )
        if variant == "2.1-i2v" and "clip_vision_output" not in conditioning:
            raise ValueError(
                f"{name} has no CLIP vision output, without which {title} would read the caption as a picture; connect "
                "clip_vision to Prepare Dataset (Load CLIP Vision, clip_vision_h.safetensors)."
            )
        if sample.clean_frames and variant != "2.2-5b":
            raise ValueError(
                f"{name} gives its first frame without noise, which only Wan 2.2 5B is shown, not {title}; prepare the "
                "data with the model's own VAE."
            )

    def notes(self, model: Any, samples: Sequence[SampleFacts]) -> list[str]:
        notes = []
        if long := sum(sample.text_length > TEXT_LENGTH for sample in samples):
            notes.append(uncut_note(long, TEXT_LENGTH, "Wan"))
        if not self.conditioning.vision_width(model) and any(
            "clip_vision_output" in sample.conditioning for sample in samples
        ):
            notes.append(
                f"{TITLES[self.variant(model)]} takes no CLIP vision output, and what the samples have is left out; "
                "clip_vision is for Wan 2.1 image to video."
            )
        return notes


FAMILIES = (Wan(),)


def _with_zeros(text: Tensor, length: int) -> Tensor:
    """Pad a text, (1, l, D), with zeros as core's encoder does. length: that of its batch."""
    return F.pad(text, (0, 0, 0, max(0, min(length, TEXT_LENGTH) - text.shape[1])))


def _spared(conditioning: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the conditioning with a cloned start picture: core scales it in place, unless its resize made a copy."""
    picture = conditioning.get(START_PICTURE)
    return conditioning if picture is None else {**conditioning, START_PICTURE: picture.clone()}


def _with_start_picture(latent: Tensor, picture: Tensor | None) -> Tensor:
    """Concatenate latent (C, T, H, W) and picture (1, C', T, H, W) → (C + C', T, H, W)."""
    if picture is None:
        return latent
    if picture.shape[2:] != latent.shape[1:]:
        raise ValueError(
            f"{START_PICTURE} has {picture.shape[2]} latent frames and its clip {latent.shape[1]}; give the node that "
            "makes it the clip's own length, width and height."
        )
    return torch.cat((latent, picture[0]))


def _joined(images: Sequence[Tensor | None]) -> Tensor:
    """Batch CLIP vision's outputs, (B, I, 1280)."""
    embeddings = [image for image in images if image is not None]
    if len(embeddings) < len(images) or len({image.shape for image in embeddings}) > 1:
        raise ValueError(
            "Samples have clip_vision_output of different lengths, or none; encode one start picture for each with the "
            "same CLIP vision model."
        )
    return torch.cat(embeddings)

"""Wan 2.1 and 2.2: text and image to video of 14B, and 5B, whose clips may begin with a clean frame."""

import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import tiny
import torch
from tiny.data.image_encoders import load_clip_vision, load_wan22_vae
from tiny.models.family_case import (
    ALL,
    SAME_BLOCKS,
    TARGETS,
    Batch,
    Captions,
    Diffusers,
    Encoders,
    FamilyCase,
    Learning,
)
from torch import Tensor

WAN_FORWARD = runpy.run_path(str(Path(__file__).parents[1] / "reference" / "wan.py"))["wan_forward"]

# A picture and clips of two and three latent frames, all of 24 tokens; the same with a ragged edge, of 18.
GRIDS = [(3, 4, 2), (1, 4, 6), (2, 3, 4), (2, 2, 6)]
RAGGED, KEPT = [(3, 3, 2), (1, 4, 5), (2, 2, 5), (2, 3, 3)], [6, 18, 9, 9]


def tokens_of(x: Tensor) -> Tensor:
    """(C, T, 2h, 2w) → (T, h·w, 4·C), ordered as (row, column, channel) inside a token."""
    c, t, height, width = x.shape
    return x.unfold(2, 2, 2).unfold(3, 2, 2).permute(1, 2, 3, 4, 5, 0).reshape(t, height * width // 4, 4 * c)


def padded_text(sample: Any) -> Tensor:
    """(1, L, D): zeros after the caption, as core's encoder gives them."""
    text = sample.load().text
    zeros = max(0, min(sample.text_length, 512) - text.shape[1])
    return torch.cat((text, text.new_zeros(1, zeros, text.shape[2])), dim=1)


@dataclass(frozen=True, kw_only=True)
class WanCase(FamilyCase):
    family = "wan"
    padded_caption = 512
    layouts: ClassVar[Mapping[str, str]] = {"kohya": ALL, "comfyui": ALL}
    deep: ClassVar[Mapping[str, Any]] = {"layers": 4}
    wide: ClassVar[Mapping[str, Any]] = {"dim": 256}
    forward_bounds: ClassVar[Mapping[str, float]] = {"fp32": 2e-6, "bf16": 1e-2, "fp16": 2e-3}

    def write(self, path: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
        return tiny.write_wan(path, variant=self.variant, dtype=dtype, **{"layers": 3, **sizes})

    def load(self, path: Path, dtype: torch.dtype | None = None) -> Any:
        return tiny.load_wan(path, dtype)

    def encoders(self, files: Mapping[str, Path]) -> Encoders:
        large = self.variant == "2.2-5b"
        return Encoders(
            tiny.load_wan_clip(files["umt5"]),
            load_wan22_vae() if large else tiny.load_vae(files["wan_vae"]),
            load_clip_vision(1280) if self.variant == "2.1-i2v" else None,
            {"megapixels": 0.012 if large else 0.003, "image_to_video": self.variant != "2.1-t2v"},
        )

    def folders(self) -> dict[str, int]:
        return {"clips": 2} if "i2v" in self.variant else {"clips": 2, "clips and pictures": 3}

    def batches(self) -> dict[str, Batch]:
        """5B's clips come with a clean first frame, but for "all noisy"."""
        batches: dict[str, Batch] = {
            "shapes": partial(self.samples, GRIDS),
            "ragged": partial(self.samples, RAGGED, KEPT),
        }
        if self.variant in ("2.1-t2v", "2.1-i2v"):
            batches["long captions"] = lambda: [
                replace(sample, load=tiny.wan_sample(f"{n}", sample.grid, self.variant, text=n).load, text_length=768)
                for n, sample in zip((7, 600, 700), self.samples(GRIDS), strict=False)
            ]
        if self.variant == "2.1-i2v":
            batches["captions of 512"] = partial(self.samples, GRIDS, text_length=512)
        if self.variant == "2.2-5b":
            batches["all noisy"] = partial(self.samples, GRIDS, clean=False)
        return batches

    def samples(
        self,
        grids: Sequence[tuple[int, int, int]],
        kept_tokens: Sequence[int] | None = None,
        clean: bool = True,
        **options: Any,
    ) -> list[Any]:
        clean = clean and self.variant == "2.2-5b"
        return [
            tiny.wan_sample(
                f"sample {i}",
                grid,
                self.variant,
                keep=keep,
                text=4 + 2 * i,
                clean_frames=int(clean and grid[0] > 1),
                **options,
            )
            for i, (grid, keep) in enumerate(zip(grids, kept_tokens or [None] * len(grids), strict=True))
        ]

    def mixed(self) -> list[Any]:
        """Pictures and clips of one to six latent frames in twelve shapes of 24 tokens, four with a ragged edge; 5B's
        clips have a clean first frame or none, by turns. Captions of 2 to 13 tokens."""
        whole = [(1, 4, 6), (1, 3, 8), (1, 6, 4), (2, 3, 4), (2, 2, 6), (3, 4, 2), (4, 3, 2), (6, 2, 2)]
        ragged = [((1, 5, 5), 24), ((2, 3, 5), 12), ((3, 3, 3), 8), ((1, 4, 7), 24)]
        samples = []
        for i, (grid, keep) in enumerate([(grid, grid[1] * grid[2]) for grid in whole] + ragged):
            clean = int(self.variant == "2.2-5b" and grid[0] > 1 and i % 2 == 0)
            options = {"keep": keep, "text": 2 + i, "text_length": 16, "clean_frames": clean}
            samples.append(tiny.wan_sample(f"sample {i}", grid, self.variant, **options))
        return samples

    def mixed_keys(self) -> list[tuple[int, tuple[int, ...], int]]:
        return [(24, (), 16)]

    def captions(self) -> Captions:
        lengths = (3, 200, 512, 513, 700)
        samples = [tiny.wan_sample(f"{n}", (1, 2, 2), self.variant, text=n, text_length=n) for n in lengths]
        return Captions(samples, 2, "2 captions have more than 512 tokens")

    def learning(self, folder: Path) -> Learning:
        """Two clips by their captions. scale: the latents' deviation, so much above that of noise that a clip is known
        when the part of it is."""
        model = self.load(self.write(folder / "wan.safetensors", layers=2))
        options = {"steps": 120, "batch_size": 2, "optimizer": {"learning_rate": 3e-3, "lr_scheduler": "cosine"}}
        clips = [self._clip_of(name, 3.0 if self.variant == "2.2-5b" else 8.0) for name in ("a fox", "a crow")]
        return Learning(model, clips, options, near=0.35, far=1.0)

    def _clip_of(self, name: str, scale: float) -> Any:
        """A clip of one colour: its text is no part of Wan's self-attention, so under noise a token would know its
        place from the edges of the clip alone, which takes longer to learn than a test may run."""
        clean = int(self.variant == "2.2-5b")
        options = {"text": 40, "text_length": 512, "clean_frames": clean, "scale": scale}
        sample = tiny.wan_sample(name, (2, 2, 3), self.variant, **options)
        read = sample.load()
        still = replace(read, latent=read.latent[:, :1, :1, :1].expand_as(read.latent).contiguous())
        return replace(sample, load=lambda *_: still)

    def core_text(self, sample: Any) -> Tensor:
        return padded_text(sample)

    def is_target(self, name: str) -> bool:
        return name.startswith("blocks.")

    def header(self) -> dict[str, str]:
        """As musubi-tuner writes it."""
        return {
            "modelspec.architecture": f"wan{'2.2' if self.variant == '2.2-5b' else '2.1'}/lora",
            "ss_base_model_version": "wan",
            "ss_network_module": "networks.lora_wan",
        }

    def diffusers(self) -> Diffusers:
        from diffusers.loaders.lora_pipeline import WanLoraLoaderMixin

        layouts = {"diffusers": ALL, "kohya": TARGETS, "comfyui": TARGETS}
        # diffusers takes the last 512 tokens of text and image for the text.
        batches = ("captions of 512",) if self.variant == "2.1-i2v" else ("shapes",)
        return Diffusers(
            WanLoraLoaderMixin, _diffusers_model, _diffusers_rows, layouts, self._velocity, batches, _sines_of_core
        )

    def _velocity(self, transformer: Any, sample: Any, x_t: Tensor, sigma: float, guidance: float) -> Tensor:
        """As WanPipeline and WanImageToVideoPipeline call it: with a timestep for each token if a frame is clean."""
        read = sample.load()
        dtype = x_t.dtype
        vision = None
        x, timestep = x_t[None], torch.tensor([1000 * sigma], dtype=dtype)
        if sample.clean_frames:
            clean = sample.clean_frames * sample.tokens // sample.grid[0]
            timestep = timestep.repeat(1, sample.tokens)
            timestep[:, :clean] = 0
        if "concat_latent_image" in read.conditioning:
            picture = self.in_model_space(read.conditioning["concat_latent_image"][0].to(dtype))[None]
            start_mask = 1 - read.conditioning["concat_mask"].to(dtype).repeat(1, 4, 1, 1, 1)
            x = torch.cat((x, start_mask, picture), dim=1)
        if self.variant == "2.1-i2v":
            vision = read.conditioning["clip_vision_output"].penultimate_hidden_states.to(dtype)
        return self.tokens(transformer(x, timestep, padded_text(sample).to(dtype), vision).sample[0], sample)

    def tokens(self, latent: Tensor, sample: Any) -> Tensor:
        return tokens_of(latent)[:, : sample.tokens // sample.grid[0]].flatten(0, 1)

    def in_model_space(self, latent: Tensor) -> Tensor:
        """(latent − mean) / std of each channel, by the numbers that ComfyUI has of Wan's autoencoders."""
        import comfy.latent_formats

        latent_format = comfy.latent_formats.Wan22() if self.variant == "2.2-5b" else comfy.latent_formats.Wan21()
        return (latent - latent_format.latents_mean[0].to(latent)) / latent_format.latents_std[0].to(latent)

    def shift(self, sample: Any) -> float:
        return 3.0

    def reference_velocity(
        self, tensors: Any, sample: Any, x_t: Tensor, sigma: float, guidance: float = 1.0, lora: Any = None
    ) -> Tensor:
        read, dtype = sample.load(), x_t.dtype
        frames, height, width = sample.grid
        x = x_t
        if "concat_latent_image" in read.conditioning:
            picture = self.in_model_space(read.conditioning["concat_latent_image"][0].to(dtype))
            start_mask = (1 - read.conditioning["concat_mask"][0].to(dtype)).repeat(4, 1, 1, 1)
            x = torch.cat((x, start_mask, picture))
        axes = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
        positions = torch.stack(axes, dim=-1).reshape(frames, -1, 3)[:, : sample.tokens // frames].reshape(1, -1, 3)
        timestep = torch.where(positions[..., 0] < sample.clean_frames, 0.0, 1000 * torch.tensor(sigma, dtype=dtype))
        vision = read.conditioning.get("clip_vision_output")
        return WAN_FORWARD(
            {name: tensor.to(dtype) for name, tensor in tensors.items()},
            self.tokens(x, sample)[None],
            positions,
            padded_text(sample).to(dtype),
            timestep,
            image=None if vision is None else vision.penultimate_hidden_states.to(dtype),
            num_heads=len(tensors["patch_embedding.weight"]) // 128,
            lora=lora,
        )[0]

    def core_velocity(
        self, model: Any, sample: Any, sigma: float, guidance: float = 1.0, x_t: Tensor | None = None
    ) -> Tensor:
        import comfy.model_management

        comfy.model_management.load_models_gpu([model])
        x = sample.load().latent[None] if x_t is None else x_t
        with torch.no_grad():
            if sample.tokens < sample.grid[0] * sample.grid[1] * sample.grid[2]:
                return _core_on_kept_tokens(model, sample, sigma, x)
            denoised = model.model.apply_model(x, torch.tensor([sigma]), **_core_conds(model, sample, x))
        return self.tokens(((x.double() - denoised.double()) / sigma)[0], sample).float()


def _diffusers_rows(model: Any, native: dict[str, Tensor]) -> dict[str, Tensor]:
    """By diffusers' own converter of checkpoints."""
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    return convert_wan_transformer_to_diffusers({name: tensor.clone() for name, tensor in native.items()})


def _diffusers_model(model: Any) -> Any:
    from diffusers import WanTransformer3DModel

    core = model.model.diffusion_model
    with_image = hasattr(core, "img_emb") and core.img_emb is not None
    transformer = WanTransformer3DModel(
        num_attention_heads=core.num_heads,
        in_channels=core.in_dim,
        out_channels=core.out_dim,
        text_dim=core.text_embedding[0].in_features,
        ffn_dim=core.ffn_dim,
        num_layers=len(core.blocks),
        image_dim=1280 if with_image else None,
        added_kv_proj_dim=core.dim if with_image else None,
    )
    transformer.load_state_dict(_diffusers_rows(model, core.state_dict()))
    return transformer.requires_grad_(False)


def _sines_of_core(transformer: Any) -> None:
    """Core raises 10,000 to its powers in fp32, diffusers uses exponentials: sines of arguments up to 1000 differ."""
    from comfy.ldm.wan.model import sinusoidal_embedding_1d

    projection = transformer.condition_embedder.timesteps_proj
    projection.forward = partial(sinusoidal_embedding_1d, projection.num_channels)


def _core_conds(model: Any, sample: Any, x: Tensor) -> dict[str, Any]:
    """Conditioning that core's `extra_conds` makes of a sample whose noisy latent is x (1, C, T, H, W)."""
    read = sample.load()
    copied = {k: v.clone() if isinstance(v, Tensor) else v for k, v in read.conditioning.items()}
    core_conds = model.model.extra_conds(noise=x, device=x.device, cross_attn=padded_text(sample), **copied)
    conds = {name: cond.cond for name, cond in core_conds.items()}
    if sample.clean_frames:
        # What core's sampler passes on of a latent's noise mask.
        mask = torch.ones(1, 1, *x.shape[2:])
        mask[:, :, : sample.clean_frames] = 0
        conds["denoise_mask"] = mask
    return conds


def _core_on_kept_tokens(model: Any, sample: Any, sigma: float, x: Tensor) -> Tensor:
    """From core's own modules, called one by one on just the tokens that a ragged edge keeps."""
    from comfy.ldm.wan.model import sinusoidal_embedding_1d

    core = model.model.diffusion_model
    conds = _core_conds(model, sample, x)
    if "c_concat" in conds:
        x = torch.cat((x, conds["c_concat"]), dim=1)
    frames, height, width = sample.grid
    indices = torch.arange(frames * height * width).reshape(frames, -1)[:, : sample.tokens // frames].flatten()
    h = core.patch_embedding(x).flatten(2).transpose(1, 2)[:, indices]
    freqs = core.rope_encode(*x.shape[2:], device=x.device, dtype=x.dtype)[:, indices]
    t = torch.full((frames,), 1000 * sigma)
    t[: sample.clean_frames] = 0
    t = t.repeat_interleave(sample.tokens // frames)
    e = core.time_embedding(sinusoidal_embedding_1d(core.freq_dim, t))[None]
    projected = core.time_projection(e).unflatten(2, (6, core.dim))
    context, image = core.text_embedding(conds["c_crossattn"]), conds.get("clip_fea")
    if image is not None:
        context = torch.cat((core.img_emb(image), context), dim=1)
    for block in core.blocks:
        h = block(h, e=projected, freqs=freqs, context=context, context_img_len=257)
    return core.head(h, e)[0]


SAME_AS_T2V = "its blocks are those of 2.1-t2v"
LEARNED_BY_OTHERS = {"learning": "2.1-t2v and 5B learn; a start picture would tell what is to be learned"}

CASES = [
    WanCase(name="wan-2.1-t2v", variant="2.1-t2v", linears=6 + 3 * 10, targets=3 * 10),
    WanCase(name="wan-2.1-i2v", variant="2.1-i2v", linears=8 + 3 * 12, targets=3 * 12, left_out=LEARNED_BY_OTHERS),
    WanCase(
        name="wan-2.2-i2v-14b",
        variant="2.2-i2v-14b",
        linears=6 + 3 * 10,
        targets=3 * 10,
        left_out=LEARNED_BY_OTHERS | dict.fromkeys(SAME_BLOCKS, SAME_AS_T2V),
    ),
    WanCase(name="wan-2.2-5b", variant="2.2-5b", linears=6 + 3 * 10, targets=3 * 10),
]

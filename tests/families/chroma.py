"""Chroma, with captions of several lengths in a batch, and with a guidance if it is given."""

import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tiny
import torch
from tiny.data.encoders import load_chroma_clip
from tiny.models.chroma import (
    APPROXIMATOR,
    APPROXIMATOR_LAYERS,
    APPROXIMATOR_WIDTH,
    chroma_sample,
    load_chroma,
    write_chroma,
)
from tiny.models.family_case import ALL, Batch, Captions, Diffusers, Encoders, Learning
from torch import Tensor

from .flux import FluxCase, norms_of_core, placed, rows_by_table

REFERENCE = runpy.run_path(str(Path(__file__).parents[1] / "reference" / "chroma.py"))
GRIDS = [(4, 12), (8, 6), (6, 8)]
TEXTS = (1, 31, 128)  # all of them take 128 tokens


@dataclass(frozen=True, kw_only=True)
class ChromaCase(FluxCase):
    family = "chroma"
    deep = {"depth": 3, "depth_single": 3}
    deep_blocks = 6
    never_trained = (f"{APPROXIMATOR}.",)

    def write(self, path: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
        return write_chroma(path, dtype=dtype, **sizes)

    def load(self, path: Path, dtype: torch.dtype | None = None) -> Any:
        return load_chroma(path, dtype)

    def encoders(self, files: Mapping[str, Path]) -> Encoders:
        return Encoders(load_chroma_clip(files["t5"]), tiny.load_vae(files["vae"]))

    def folders(self) -> dict[str, int]:
        return {"pictures": 2}  # captions keep their own length

    def batches(self) -> dict[str, Batch]:
        return {
            "shapes": partial(_samples, GRIDS),
            "ragged": partial(_samples, GRIDS, tokens=45),
            "guidance": lambda: [chroma_sample(f"{g}", 4, 6, 9, guidance=g) for g in (0.0, 1.0, 3.5)],
            "captions of 512 and more": lambda: [chroma_sample(f"{n}", 2, 2, n) for n in (513, 700)],
            "captions without a pad": lambda: [chroma_sample(f"{i}", 2, 2, 128) for i in range(3)],
        }

    def mixed(self) -> list[Any]:
        """12 pictures of seven shapes, all of 24 tokens, some with a ragged edge; captions of 3 to 256 tokens."""
        shapes = [(4, 6), (6, 4), (3, 8), (8, 3), (2, 12), (12, 2)]
        grids = [(shapes[i % 6], None) if i % 4 else ((5, 5), 24) for i in range(12)]
        return [chroma_sample(f"{i}", *grid, 3 + 23 * i, tokens=keep) for i, (grid, keep) in enumerate(grids)]

    def mixed_keys(self) -> list[tuple[int, tuple[int, ...], int]]:
        return [(24, (), length) for length in (128, 256)]

    def captions(self) -> Captions:
        samples = [chroma_sample(f"{n}", 2, 2, n) for n in (1, 128, 200, 513)]
        return Captions(samples, 3, "1 caption has more than 512 tokens")

    def learning(self, folder: Path) -> Learning:
        """One picture of one colour, with the guidance that it is sampled with, on a model of quiet blocks."""
        model = self.load(self.write(folder / "chroma.safetensors", hidden=256, depth=1, depth_single=1, quiet=True))
        options = {"steps": 200, "optimizer": {"learning_rate": 2e-3, "lr_scheduler": "cosine"}}
        sample = chroma_sample("the picture", 2, 2, scale=2.77, guidance=1.0)
        latent = sample.load().latent
        latent.copy_(latent[:, :1, :1].expand_as(latent).clone())
        return Learning(model, [sample], options, near=0.35, far=0.9)

    def is_target(self, name: str) -> bool:
        return "_blocks." in name

    def header(self) -> dict[str, str]:
        return {
            "modelspec.architecture": "chroma/lora",
            "ss_base_model_version": "chroma",
            "ss_network_module": "networks.lora_flux",
        }

    def diffusers(self) -> Diffusers:
        from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin

        layouts = {"diffusers": ALL}
        return Diffusers(
            FluxLoraLoaderMixin, diffusers_model, diffusers_rows, layouts, _velocity, as_core=norms_of_core
        )

    def tokens(self, latent: Tensor, sample: Any) -> Tensor:
        return placed(latent, 2, (0, 0, 0))[0][0, : sample.tokens]

    def in_model_space(self, latent: Tensor) -> Tensor:
        """As Black Forest Labs' autoencoder defines it."""
        return (latent - 0.1159) * 0.3611

    def reference_velocity(
        self, tensors: Any, sample: Any, x_t: Tensor, sigma: float, guidance: float = 1.0, lora: Any = None
    ) -> Tensor:
        """Each caption alone, unpadded, with the guidance of its conditioning."""
        read, dtype = sample.load(), x_t.dtype
        tokens, ids = (part[:, : sample.tokens] for part in placed(x_t, 2, (0, 0, 0)))
        return REFERENCE["chroma_forward"](
            {name: tensor.to(dtype) for name, tensor in tensors.items()},
            tokens,
            ids,
            read.text.to(dtype),
            torch.tensor([sigma], dtype=dtype),
            torch.tensor([read.conditioning.get("guidance", 0.0)], dtype=dtype),
            num_heads=len(tensors["img_in.weight"]) // 128,
            lora=lora,
        )[0]

    def core_velocity(
        self, model: Any, sample: Any, sigma: float, guidance: float = 1.0, x_t: Tensor | None = None
    ) -> Tensor:
        distilled_guidance = sample.load().conditioning.get("guidance", 0.0)
        return super().core_velocity(model, sample, sigma, distilled_guidance, x_t)


def _samples(grids: Sequence[tuple[int, int]], tokens: int | None = None) -> list[Any]:
    pairs = zip(grids, TEXTS, strict=True)
    return [chroma_sample(f"{i}", *grid, text, tokens=tokens) for i, (grid, text) in enumerate(pairs)]


def diffusers_rows(model: Any, native: dict[str, Tensor]) -> dict[str, Tensor]:
    """The blocks by ComfyUI's table of FLUX's names, the approximator by its own names, which differ in its layers."""
    approximator = {name: tensor for name, tensor in native.items() if name.startswith(APPROXIMATOR)}
    renamed = {
        name.replace("in_layer", "linear_1").replace("out_layer", "linear_2"): t for name, t in approximator.items()
    }
    rows = rows_by_table(model.model.model_config.unet_config, native) | renamed
    names = dict(_empty_diffusers_model().named_parameters())  # the table has the names of FLUX.2 as well
    return {name: tensor for name, tensor in rows.items() if name in names}


def diffusers_model(model: Any) -> Any:
    transformer = _empty_diffusers_model()
    transformer.load_state_dict(diffusers_rows(model, model.model.diffusion_model.state_dict()))
    return transformer.requires_grad_(False)


def _empty_diffusers_model() -> Any:
    """Of the tiny size, with a number for each of the 344 vectors: it counts only those that its own blocks take."""
    from diffusers import ChromaTransformer2DModel
    from diffusers.models.embeddings import get_timestep_embedding

    transformer = ChromaTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=1,
        joint_attention_dim=tiny.T5_WIDTH,
        approximator_hidden_dim=APPROXIMATOR_WIDTH,
        approximator_layers=APPROXIMATOR_LAYERS,
    )
    numbers = 1000 * torch.arange(REFERENCE["VECTORS"])
    options = {"flip_sin_to_cos": True, "downscale_freq_shift": 0}
    transformer.time_text_embed.mod_proj = get_timestep_embedding(numbers, 32, **options)
    return transformer


def _velocity(transformer: Any, sample: Any, x_t: Tensor, sigma: float, guidance: float) -> Tensor:
    """As ChromaPipeline calls it on a caption without pads; it knows no guidance."""
    from diffusers import ChromaPipeline

    (c, h, w) = x_t.shape
    dtype = x_t.dtype
    text = sample.load().text
    return transformer(
        hidden_states=ChromaPipeline._pack_latents(x_t[None], 1, c, h, w),
        encoder_hidden_states=text.to(dtype),
        timestep=torch.tensor([sigma], dtype=dtype),
        img_ids=ChromaPipeline._prepare_latent_image_ids(1, h // 2, w // 2, "cpu", dtype),
        txt_ids=torch.zeros(text.shape[1], 3),
    ).sample[0, : sample.tokens]


CASES = [ChromaCase(name="chroma", variant="chroma", linears=2 + 2 * 8 + 2 * 2 + 1, targets=2 * 8 + 2 * 2)]

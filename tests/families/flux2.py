"""FLUX.2: dev and klein, with and without references."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import tiny
import torch
from safetensors.torch import load_file, save_file
from tessera.models.flux.family import resolution_shift
from tiny.data.image_encoders import load_flux2_vae, load_klein_clip, load_mistral_clip
from tiny.models.family_case import ALL, SAME_SIZES, TARGETS, Batch, Captions, Diffusers, Encoders, Learning
from tiny.models.flux import flux_sample
from torch import Tensor

from .flux import REFERENCE, FluxCase, mixed_samples, norms_of_core, placed, to_tokens

ZERO = "index_timestep_zero"
REFERENCES = [[(4, 6), (3, 3)], [(6, 4), (1, 9)], [(8, 3), (9, 1)]]
GRIDS, RAGGED = [(4, 6), (3, 8), (12, 2)], [(4, 6), (5, 5), (3, 8)]


@dataclass(frozen=True, kw_only=True)
class Flux2Case(FluxCase):
    family = "flux2"
    # ComfyUI's table of diffusers' names for FLUX holds FLUX.2's blocks and none of its outer layers.
    layouts: ClassVar[Mapping[str, str]] = {"kohya": ALL, "comfyui": ALL, "diffusers": TARGETS}
    padded_caption = 512
    deep = {"depth": 2, "depth_single": 3}
    deep_blocks = 5
    main_batches = ("shapes", "timestep zero")

    def write(self, path: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
        return tiny.write_flux2(path, guidance=self.variant == "dev", dtype=dtype, **sizes)

    def load(self, path: Path, dtype: torch.dtype | None = None) -> Any:
        return tiny.load_flux2(path, dtype)

    def encoders(self, files: Mapping[str, Path]) -> Encoders:
        clip = load_mistral_clip() if self.variant == "dev" else load_klein_clip()
        return Encoders(clip, load_flux2_vae(), sizes={"context_dim": 96})

    def folders(self) -> dict[str, int]:
        return {"pictures": 1, "controls": 1}

    def batches(self) -> dict[str, Batch]:
        batches: dict[str, Batch] = {
            "shapes": partial(_samples, GRIDS),
            "ragged": partial(_samples, RAGGED, tokens=23),
            "index": partial(_samples, GRIDS, REFERENCES, "index"),
            "timestep zero": partial(_samples, GRIDS, REFERENCES, ZERO),
            "ragged timestep zero": partial(_samples, RAGGED, REFERENCES, ZERO, 23),
            "captions of 512 and more": lambda: [flux_sample(f"{i}", 2, 2, 700) for i in range(2)],
            "captions of several lengths": lambda: [
                replace(flux_sample(f"{n}", 4, 6, n, [(6, 4)], method=ZERO), text_length=768) for n in (300, 513, 700)
            ],
            "captions of 5 to 512": lambda: [flux_sample(f"{n}", 4, 6, n) for n in (5, 40, 512)],
            "several methods": lambda: [flux_sample(f"{m}", 4, 6, 9, [(6, 4)], method=m) for m in (ZERO, None, "uxo")],
        }
        for method in (None, "offset", "index", ZERO, "uxo"):
            name = method or "by default"
            batches[f"references {name}"] = partial(_samples, [(4, 6), (8, 3), (2, 12)], REFERENCES, method)
            batches[f"references {name}, ragged edge"] = partial(_samples, RAGGED, REFERENCES, method, 23)
        return batches

    def mixed(self) -> list[Any]:
        return mixed_samples("flux2", (None, ZERO, "offset"), lambda i: 3 + 20 * i)

    def mixed_keys(self) -> list[tuple[int, tuple[int, ...], int]]:
        return [(24, references, 512) for references in ((), (16, 48), (48,))]

    def captions(self) -> Captions:
        samples = [flux_sample(f"{n}", 2, 2, n) for n in (1, 200, 512, 513)]
        return Captions(samples, 2, "1 caption has more than 512 tokens")

    def learning(self, folder: Path) -> Learning:
        """One edit of one colour, on a model that carries its input through to its output past quiet blocks."""
        path = self.write(folder / "flux2.safetensors", depth=1, depth_single=1, hidden=256)
        tensors = load_file(path)
        identity = torch.eye(256, 128)
        tensors["img_in.weight"] = 0.02 * tensors["img_in.weight"] + identity
        tensors["final_layer.linear.weight"] = 0.02 * tensors["final_layer.linear.weight"] + identity.T
        for name in tensors:
            if name.endswith(("_attn.proj.weight", "_mlp.2.weight", "linear2.weight", "adaLN_modulation.1.weight")):
                tensors[name] = 0.2 * tensors[name]
        save_file(tensors, path, {"format": "pt"})
        sample = flux_sample("the picture", 2, 2, references=[(2, 2)])
        latent = sample.load().latent
        latent.copy_(latent[:, :1, :1].expand_as(latent).clone())
        options = {"steps": 200, "optimizer": {"learning_rate": 2e-3, "lr_scheduler": "cosine"}}
        return Learning(self.load(path), [sample], options, near=0.35, far=0.9)

    def is_target(self, name: str) -> bool:
        return "_blocks." in name

    def header(self) -> dict[str, str]:
        return {"modelspec.architecture": f"Flux.2-{self.variant}/lora", "ss_network_module": "networks.lora_flux_2"}

    def diffusers(self) -> Diffusers:
        from diffusers.loaders.lora_pipeline import Flux2LoraLoaderMixin

        # Its converter of kohya's keys knows the blocks only. It takes the last modulation's (shift, scale) of
        # ComfyUI's format as they are, though it holds (scale, shift).
        layouts = {"kohya": TARGETS, "comfyui": ALL, "diffusers": ALL}
        differs = {"comfyui": ("norm_out.linear",)}
        return Diffusers(
            Flux2LoraLoaderMixin,
            _diffusers_model,
            _diffusers_rows,
            layouts,
            _velocity,
            ("shapes", "references by default"),
            norms_of_core,
            differs,
        )

    def gradients(self) -> dict[str, tuple[int, ...]]:
        return {"shapes": (1, 3), "index": (3,), "timestep zero": (3,)}

    def tokens(self, latent: Tensor, sample: Any) -> Tensor:
        return to_tokens(latent, 1)[: sample.tokens]

    def in_model_space(self, latent: Tensor) -> Tensor:
        """ComfyUI's VAE gives it so."""
        return latent

    def shift(self, sample: Any) -> float:
        return resolution_shift(sample.tokens)

    def reference_velocity(
        self, tensors: Any, sample: Any, x_t: Tensor, sigma: float, guidance: float = 1.0, lora: Any = None
    ) -> Tensor:
        """Captions are padded left to 512 tokens; references are at 10 and 20 of the first axis."""
        read = sample.load()
        keep = sample.tokens
        dtype = x_t.dtype
        tokens, ids = (part[:, :keep] for part in placed(x_t, 1, (0, 0, 0, 0)))
        for i, reference in enumerate(read.conditioning.get("reference_latents", ())):
            reference_tokens, reference_ids = placed(reference[0].to(dtype), 1, (10 * (i + 1), 0, 0, 0))
            tokens, ids = torch.cat([tokens, reference_tokens], dim=1), torch.cat([ids, reference_ids], dim=1)
        levels = torch.full(tokens.shape[:2], sigma, dtype=dtype)
        if read.conditioning.get("reference_latents_method") == ZERO:
            levels[:, keep:] = 0
        text = read.text.to(dtype)
        return REFERENCE["flux2_forward"](
            {name: tensor.to(dtype) for name, tensor in tensors.items()},
            tokens,
            ids,
            torch.cat([text.new_zeros(1, 512 - text.shape[1], text.shape[2]), text], dim=1),
            levels,
            torch.tensor([guidance], dtype=dtype),
            num_heads=len(tensors["img_in.weight"]) // 128,
            lora=lora,
        )[0, :keep]


def _diffusers_rows(model: Any, native: dict[str, Tensor]) -> dict[str, Tensor]:
    """By diffusers' own converter of checkpoints, which wants all of one."""
    from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers

    weights = model.model.diffusion_model.state_dict()
    names = {name: name.replace("_norm.weight", "_norm.scale") for name in weights}
    dtype = next(iter(native.values())).dtype
    rest = {names[name]: torch.zeros_like(t, dtype=dtype) for name, t in weights.items() if names[name] not in native}
    return convert_flux2_transformer_checkpoint_to_diffusers({n: t.clone() for n, t in native.items()} | rest)


def _diffusers_model(model: Any) -> Any:
    from diffusers import Flux2Transformer2DModel

    net = model.model.diffusion_model
    transformer = Flux2Transformer2DModel(
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=1,
        joint_attention_dim=net.params.context_in_dim,
        guidance_embeds=net.params.guidance_embed,
    )
    weights = {name.replace("_norm.weight", "_norm.scale"): tensor for name, tensor in net.state_dict().items()}
    transformer.load_state_dict(_diffusers_rows(model, weights), strict=True)
    return transformer.requires_grad_(False)


def _velocity(transformer: Any, sample: Any, x_t: Tensor, sigma: float, guidance: float) -> Tensor:
    """As Flux2Pipeline calls it, on a caption that is padded left to 512 tokens."""
    from diffusers import Flux2Pipeline

    read, dtype = sample.load(), x_t.dtype
    references = [reference.to(dtype) for reference in read.conditioning.get("reference_latents", ())]
    tokens = torch.cat([Flux2Pipeline._pack_latents(latent) for latent in (x_t[None], *references)], dim=1)
    ids = Flux2Pipeline._prepare_latent_ids(x_t[None])
    if references:
        ids = torch.cat((ids, Flux2Pipeline._prepare_image_ids(references)), dim=1)
    text = read.text.to(dtype)
    text = torch.cat((text.new_zeros(1, 512 - text.shape[1], text.shape[2]), text), dim=1)
    return transformer(
        hidden_states=tokens,
        encoder_hidden_states=text,
        timestep=torch.tensor([sigma], dtype=dtype),
        img_ids=ids,
        txt_ids=Flux2Pipeline._prepare_text_ids(text),
        guidance=torch.tensor([guidance], dtype=dtype),
    ).sample[0, : sample.tokens]


def _samples(grids: Any, references: Any = None, method: str | None = None, tokens: int | None = None) -> list[Any]:
    pairs = enumerate(zip(grids, references or [()] * 3, strict=True))
    return [flux_sample(f"{i}", *grid, 5 + 40 * i, sizes, method=method, tokens=tokens) for i, (grid, sizes) in pairs]


CASES = [
    Flux2Case(
        name="flux2-dev",
        variant="dev",
        linears=2 + 4 + 3 + 2 * 8 + 2 * 2 + 2,
        targets=2 * 8 + 2 * 2,
        left_out={"learning": "klein learns, which has no guidance for a random model to make much of"},
    ),
    Flux2Case(
        name="flux2-klein",
        variant="klein",
        linears=2 + 2 + 3 + 2 * 8 + 2 * 2 + 2,
        targets=2 * 8 + 2 * 2,
        left_out=dict.fromkeys(SAME_SIZES, "its blocks are those of dev"),
    ),
]

"""Qwen-Image, and Qwen-Image-Edit-2511, whose references have a timestep of zero."""

import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tiny
import torch
from tiny.data.image_encoders import load_seeing_qwen_clip
from tiny.models.family_case import ALL, Batch, Captions, Diffusers, Encoders, FamilyCase, Learning
from tiny.models.qwen_image import qwen_sample
from torch import Tensor

REFERENCE = runpy.run_path(str(Path(__file__).parents[1] / "reference" / "qwen_image.py"))
METHODS = (None, "index", "index_timestep_zero", "negative_index", "offset", "uxo")
REFERENCES = [[(4, 6), (6, 8)], [(6, 4), (8, 6)], [(12, 2), (4, 12)]]


@dataclass(frozen=True, kw_only=True)
class QwenImageCase(FamilyCase):
    family = "qwen-image"
    deep = {"layers": 4}
    ragged_in_core = False
    main_batches = ("shapes", "references")
    unused = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")

    def timestep_zero(self) -> bool:
        return self.variant == "qwen-image-edit-2511"

    def write(self, path: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
        return tiny.write_qwen_image(path, timestep_zero=self.timestep_zero(), dtype=dtype, **sizes)

    def load(self, path: Path, dtype: torch.dtype | None = None) -> Any:
        return tiny.load_qwen_image(path, dtype)

    def encoders(self, files: Mapping[str, Path]) -> Encoders:
        return Encoders(load_seeing_qwen_clip(files["qwen"]), tiny.load_vae(files["wan_vae"]))

    def folders(self) -> dict[str, int]:
        return {"pictures": 1, "controls": 2}  # a caption that sees a control picture is longer

    def batches(self) -> dict[str, Batch]:
        """Captions of three lengths, all of which take 128 tokens."""
        batches: dict[str, Batch] = {
            "shapes": partial(_samples, [()] * 3),
            "ragged": partial(_samples, [()] * 3, tokens=22),
            "references": partial(_samples, REFERENCES),
            "odd sides": lambda: [qwen_sample("odd", 5, 3, 9, [(7, 5), (3, 8)])],
            "even sides": partial(_even_sides, [()] * 3),
            "even sides, smaller references": partial(_even_sides, [[(4, 8), (8, 4)], [(8, 4), (8, 4)], [(4, 8)] * 2]),
            "even sides, a larger reference": lambda: [qwen_sample("larger", 4, 6, 9, [(4, 16)])],
            "several methods": lambda: [
                qwen_sample(name, 4, 6, 9, [(6, 4)], method)
                for name, method in zip("abc", ("index_timestep_zero", None, "offset"), strict=True)
            ],
        }
        for method in METHODS:
            batches[f"three {method or 'by default'}"] = partial(_three_references, method)
        return batches

    def mixed(self) -> list[Any]:
        """24 pictures of seven shapes, all of 24 tokens, some with a ragged edge; captions of 3 to 245 tokens in two
        steps of the ladder; a third with one reference picture, a third with two."""
        shapes = [(4, 6), (6, 4), (3, 8), (8, 3), (2, 12), (12, 2)]
        samples = []
        for i in range(24):
            grid, keep = (shapes[i % 6], None) if i % 4 else ((5, 5), 24)
            references = [(), [(6, 8)], [(4, 4), (8, 6)]][i % 3]
            if i % 6 >= 3:
                references = [side[::-1] for side in references]
            length = 3 + i if i < 18 else 130 + 5 * i
            method = "offset" if i % 5 == 4 else None
            samples.append(qwen_sample(f"picture {i}", *grid, length, references, method, tokens=keep))
        return samples

    def mixed_keys(self) -> list[tuple[int, tuple[int, ...], int]]:
        return [(24, references, length) for references in ((), (4, 12), (12,)) for length in (128, 256)]

    def captions(self) -> Captions:
        return Captions([qwen_sample(f"{n}", 2, 2, n) for n in (1, 7, 127, 128, 129, 200, 256)], 2)

    def learning(self, folder: Path) -> Learning:
        """One picture, or one edit."""
        references = [(4, 4)] if self.timestep_zero() else ()
        options = {"steps": 450, "batch_size": 2, "optimizer": {"learning_rate": 3e-3, "lr_scheduler": "cosine"}}
        model = self.load(self.write(folder / "qwen.safetensors", layers=1))
        sample = qwen_sample("the picture", 4, 4, references=references)
        return Learning(model, [sample], options | {"objective": {"shift": 1.0}}, near=0.4, far=1.5)

    def is_target(self, name: str) -> bool:
        """Every Linear of the blocks but img_mod and txt_mod, as musubi-tuner has it."""
        return name.startswith("transformer_blocks.") and "_mod." not in name

    def header(self) -> dict[str, str]:
        return {"ss_network_module": "networks.lora_qwen_image"}

    def diffusers(self) -> Diffusers:
        from diffusers.loaders.lora_pipeline import QwenImageLoraLoaderMixin

        layouts = {"kohya": ALL, "comfyui": ALL, "diffusers": ALL}
        batch = "even sides, smaller references" if self.timestep_zero() else "even sides"
        return Diffusers(
            QwenImageLoraLoaderMixin, _diffusers_model, lambda _, native: native, layouts, self._velocity, (batch,)
        )

    def _velocity(self, transformer: Any, sample: Any, x_t: Tensor, sigma: float, guidance: float) -> Tensor:
        """As QwenImagePipeline and QwenImageEditPlusPipeline call it on a caption without pads."""
        from diffusers import QwenImagePipeline

        read = sample.load()
        dtype = x_t.dtype
        tokens = []
        shapes = []
        references = [self.in_model_space(r[0].to(dtype)) for r in read.conditioning.get("reference_latents", ())]
        for latent in (x_t, *references):
            c, t, h, w = latent.shape
            tokens.append(QwenImagePipeline._pack_latents(latent[None], 1, c, h, w))
            shapes.append((t, h // 2, w // 2))
        return transformer(
            hidden_states=torch.cat(tokens, dim=1),
            encoder_hidden_states=read.text.to(dtype),
            timestep=torch.tensor([sigma], dtype=dtype),
            img_shapes=[shapes],
        ).sample[0, : sample.tokens]

    def gradients(self) -> dict[str, tuple[int, ...]]:
        return {"references": (1, 3)} if self.timestep_zero() else {"shapes": (1, 3)}

    def tokens(self, latent: Tensor, sample: Any) -> Tensor:
        return REFERENCE["to_tokens"](latent[:, 0])[0][: sample.tokens]

    def in_model_space(self, latent: Tensor) -> Tensor:
        """(latent − mean) / std of each channel, by the numbers that ComfyUI has of Wan 2.1's autoencoder."""
        import comfy.latent_formats

        latent_format = comfy.latent_formats.Wan21()
        return (latent - latent_format.latents_mean[0].to(latent)) / latent_format.latents_std[0].to(latent)

    def shift(self, sample: Any) -> float:
        return 2.2  # musubi-tuner's

    def reference_velocity(
        self, tensors: Any, sample: Any, x_t: Tensor, sigma: float, guidance: float = 1.0, lora: Any = None
    ) -> Tensor:
        """Each caption alone, unpadded."""
        read, dtype = sample.load(), x_t.dtype
        default = "index_timestep_zero" if self.timestep_zero() else "index"
        references = read.conditioning.get("reference_latents", ())
        return REFERENCE["qwen_image_forward"](
            tensors,
            x_t[:, 0],
            read.text[0].to(dtype),
            sigma,
            references=[self.in_model_space(r[0].to(dtype))[:, 0] for r in references],
            method=read.conditioning.get("reference_latents_method", default),
            keep=sample.tokens,
            lora=lora,
        )

    def core_velocity(
        self, model: Any, sample: Any, sigma: float, guidance: float = 1.0, x_t: Tensor | None = None
    ) -> Tensor:
        import comfy.model_management

        comfy.model_management.load_models_gpu([model])
        read = sample.load()
        x = (read.latent[None] if x_t is None else x_t).to(model.load_device)
        conds = model.model.extra_conds(cross_attn=read.text, noise=x, device=x.device, **read.conditioning)
        args = {name: cond.process_cond(1, area=None, device=x.device).cond for name, cond in conds.items()}
        with torch.no_grad():
            denoised = model.model.apply_model(x, torch.tensor([sigma], device=x.device), **args)
        return self.tokens(((x.double() - denoised.double()) / sigma)[0].float().cpu(), sample)


def _diffusers_model(model: Any) -> Any:
    from diffusers import QwenImageTransformer2DModel

    weights = model.model.diffusion_model.state_dict()
    transformer = QwenImageTransformer2DModel(
        num_layers=2,
        attention_head_dim=64,
        num_attention_heads=2,
        joint_attention_dim=64,
        axes_dims_rope=(8, 28, 28),
        zero_cond_t=weights.pop("__index_timestep_zero__", None) is not None,
    )
    transformer.load_state_dict(weights)
    return transformer.requires_grad_(False)


def _samples(references: Sequence[Sequence[tuple[int, int]]], tokens: int | None = None) -> list[Any]:
    """Three aspect ratios of 24 tokens."""
    shapes = [(4, 6, 5), (6, 4, 40), (3, 8, 128)]
    return [
        qwen_sample(f"{i}", *shape, sizes, tokens=tokens)
        for i, (shape, sizes) in enumerate(zip(shapes, references, strict=True))
    ]


def _even_sides(references: Sequence[Sequence[tuple[int, int]]]) -> list[Any]:
    """Of 24 tokens."""
    shapes = [(4, 6, 5), (6, 4, 40), (2, 12, 128)]
    return [
        qwen_sample(f"even {i}", *shape, sizes) for i, (shape, sizes) in enumerate(zip(shapes, references, strict=True))
    ]


def _three_references(method: str | None) -> list[Any]:
    return [
        qwen_sample("one shape", 4, 6, 9, [(8, 4), (4, 6), (6, 8)], method),
        qwen_sample("another", 6, 4, 40, [(4, 8), (6, 4), (12, 4)], method),
    ]


CASES = [
    QwenImageCase(
        name="qwen-image",
        variant="qwen-image",
        linears=6 + 2 * 14,
        targets=2 * 12,
        left_out=dict.fromkeys(
            ("inductor", "graphs", "swap", "compiled swap"), "its blocks are those of the edit model, which sees more"
        ),
    ),
    QwenImageCase(name="qwen-image-edit-2511", variant="qwen-image-edit-2511", linears=6 + 2 * 14, targets=2 * 12),
]

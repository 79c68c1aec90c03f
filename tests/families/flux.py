"""FLUX.1: dev, which Kontext's references go into as well, and schnell."""

import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import tiny
import torch
from tiny.models.family_case import ALL, SAME_SIZES, Batch, Diffusers, Encoders, FamilyCase, Learning
from tiny.models.flux import flux_sample
from torch import Tensor

REFERENCE = runpy.run_path(str(Path(__file__).parents[1] / "reference" / "flux.py"))

# References in latent cells: the samples of a batch agree in their tokens one by one, and in nothing else.
WIDE = [(8, 4), (4, 6), (6, 6)]
TALL = [(4, 8), (6, 4), (2, 18)]
LONG = [(16, 2), (2, 12), (18, 2)]
# Positions of two references by ComfyUI's `offset`, by hand: (1, first row, first column) in tokens. The second goes
# below the first if both together are wider than high, else to its right.
OFFSETS = {
    ((8, 4), (4, 6)): [(1, 0, 0), (1, 0, 2)],
    ((4, 8), (6, 4)): [(1, 0, 0), (1, 2, 0)],
    ((16, 2), (2, 12)): [(1, 0, 0), (1, 0, 1)],
}
# Three grids of 24 tokens, and three that keep 23.
GRIDS, RAGGED = [(4, 6), (3, 8), (12, 2)], [(4, 6), (5, 5), (3, 8)]
METHODS = (None, "offset", "index", "uxo")


def to_tokens(latent: Tensor, patch: int) -> Tensor:
    """(C, H, W) → (tokens, C·patch²), ordered as (channel, row, column) inside a token."""
    cells = latent.unfold(1, patch, patch).unfold(2, patch, patch)  # (C, h, w, patch, patch)
    return cells.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)


def placed(latent: Tensor, patch: int, place: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The tokens of a latent (C, H, W) and their ids, which count rows and columns from `place`; one sample's."""
    tokens = to_tokens(latent, patch)
    h, w = latent.shape[1] // patch, latent.shape[2] // patch
    ids = torch.zeros(h, w, len(place))
    ids[..., 1] += torch.arange(h)[:, None]
    ids[..., 2] += torch.arange(w)
    return tokens[None], (ids + torch.tensor(place)).reshape(1, h * w, -1)


@dataclass(frozen=True, kw_only=True)
class FluxCase(FamilyCase):
    """Case of what FLUX.1 and FLUX.2 share."""

    kinds = 2
    wide: ClassVar[Mapping[str, Any]] = {"hidden": 256}

    def core_velocity(
        self, model: Any, sample: Any, sigma: float, guidance: float = 1.0, x_t: Tensor | None = None
    ) -> Tensor:
        """A ragged edge by leaving its tokens out of core's sequence, after its cutting into tokens."""
        import comfy.model_management

        comfy.model_management.load_models_gpu([model])
        core = model.model.diffusion_model
        read = sample.load()
        patch = model.model.diffusion_model.patch_size
        x = (read.latent[None] if x_t is None else x_t).to(model.load_device)
        conditioning = {**read.conditioning, "guidance": guidance}
        conds = model.model.extra_conds(cross_attn=read.text, noise=x, device=x.device, **conditioning)
        args = {name: cond.process_cond(1, area=None, device=x.device).cond for name, cond in conds.items()}
        picture_tokens, keep = x.shape[-2] * x.shape[-1] // patch**2, sample.tokens
        whole = core.forward_orig

        def on_kept_tokens(img: Tensor, img_ids: Tensor, *rest: Any, **options: Any) -> Tensor:
            indices = torch.cat((torch.arange(keep), torch.arange(picture_tokens, img.shape[1])))
            if options.get("timestep_zero_index") is not None:
                assert options["timestep_zero_index"] == [[picture_tokens, img.shape[1]]]
                options["timestep_zero_index"] = [[keep, len(indices)]]
            output = whole(img[:, indices], img_ids[:, indices], *rest, **options)
            out = output.new_zeros(1, img.shape[1], output.shape[-1])
            out[:, indices] = output
            return out

        core.forward_orig = on_kept_tokens
        try:
            with torch.no_grad():
                denoised = model.model.apply_model(x, torch.tensor([sigma], device=x.device), **args)
        finally:
            del core.forward_orig
        return to_tokens(((x.double() - denoised.double()) / sigma)[0].float().cpu(), patch)[:keep]


@dataclass(frozen=True, kw_only=True)
class Flux1Case(FluxCase):
    family = "flux"
    deep = {"depth": 3, "depth_single": 3}
    deep_blocks = 6
    main_batches = ("shapes", "ragged references")

    def write(self, path: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
        return tiny.write_flux(path, guidance=self.variant == "dev", dtype=dtype, **sizes)

    def load(self, path: Path, dtype: torch.dtype | None = None) -> Any:
        return tiny.load_flux(path, dtype)

    def encoders(self, files: Mapping[str, Path]) -> Encoders:
        return Encoders(tiny.load_clip(files["clip_l"], files["t5"]), tiny.load_vae(files["vae"]))

    def folders(self) -> dict[str, int]:
        return {"pictures": 1, "controls": 1}

    def batches(self) -> dict[str, Batch]:
        three = (WIDE, TALL, LONG)
        single, pairs = ([sizes[:count] for sizes in three] for count in (1, 2))
        batches: dict[str, Batch] = {
            "shapes": partial(_samples, [(4, 12), (8, 6), (6, 8)]),
            "ragged": partial(_samples, [(4, 12), (8, 6), (6, 8)], tokens=45),
            "references": partial(_samples, GRIDS, pairs),
            "ragged references": partial(_samples, RAGGED, pairs, tokens=23),
            "long captions": lambda: [
                replace(flux_sample(f"{n}", 4, 6, n, family="flux"), text_length=384) for n in (257, 300, 384)
            ],
            "without pooled text": lambda: [_without_pooled(s) if i == 1 else s for i, s in enumerate(_samples(GRIDS))],
        }
        for method in METHODS:
            name = method or "by default"
            batches[f"one {name}"] = partial(_samples, GRIDS, single, method)
            batches[f"three {name}"] = partial(_samples, GRIDS, three, method)
            batches[f"three {name}, ragged edge"] = partial(_samples, RAGGED, three, method, 23)
            batches[f"squares {name}"] = partial(_samples, [(4, 6)], [[(6, 6), (6, 6), (4, 4)]], method)
            odd = [[(7, 3), (5, 4)], [(3, 8), (4, 5)]]
            batches[f"odd sides {name}"] = partial(_samples, GRIDS[:2], odd, method)
        return batches

    def mixed(self) -> list[Any]:
        """By three of the methods, with captions of 16 tokens."""
        return mixed_samples("flux", (None, "offset", "uxo"), lambda i: 16)

    def mixed_keys(self) -> list[tuple[int, tuple[int, ...], int]]:
        return [(24, references, 16) for references in ((), (4, 12), (12,))]

    def learning(self, folder: Path) -> Learning:
        """One picture. FLUX's latents have a deviation near 1 / 0.3611."""
        model = self.load(self.write(folder / "flux.safetensors"))
        options = {"steps": 450, "batch_size": 2, "optimizer": {"learning_rate": 3e-3, "lr_scheduler": "cosine"}}
        sample = flux_sample("the picture", 4, 4, 16, family="flux", scale=2.77)
        return Learning(model, [sample], options, near=0.35, far=1.5)

    def is_target(self, name: str) -> bool:
        return "_blocks." in name and not name.endswith((".lin", "_in"))

    def header(self) -> dict[str, str]:
        return {
            "modelspec.architecture": f"flux-1-{self.variant}/lora",
            "ss_base_model_version": "flux1",
            "ss_network_module": "networks.lora_flux",
        }

    def diffusers(self) -> Diffusers:
        from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin

        batches = ("shapes", "one by default") if self.variant == "dev" else ("shapes",)
        layouts = {"diffusers": ALL}
        return Diffusers(
            FluxLoraLoaderMixin, _diffusers_model, diffusers_rows, layouts, _velocity, batches, norms_of_core
        )

    def gradients(self) -> dict[str, tuple[int, ...]]:
        return {"shapes": (1, 3), "references": (3,)}

    def tokens(self, latent: Tensor, sample: Any) -> Tensor:
        return to_tokens(latent, 2)[: sample.tokens]

    def in_model_space(self, latent: Tensor) -> Tensor:
        """As Black Forest Labs' autoencoder defines it."""
        return (latent - 0.1159) * 0.3611

    def reference_velocity(
        self, tensors: Any, sample: Any, x_t: Tensor, sigma: float, guidance: float = 1.0, lora: Any = None
    ) -> Tensor:
        read = sample.load()
        keep = sample.tokens
        dtype = x_t.dtype
        tokens, ids = (part[:, :keep] for part in placed(x_t, 2, (0, 0, 0)))
        references = read.conditioning.get("reference_latents", ())
        places = OFFSETS[tuple(tuple(r.shape[-2:]) for r in references)] if references else []
        for reference, place in zip(references, places, strict=True):
            reference_tokens, reference_ids = placed(self.in_model_space(reference[0].to(dtype)), 2, place)
            tokens, ids = torch.cat([tokens, reference_tokens], dim=1), torch.cat([ids, reference_ids], dim=1)
        return REFERENCE["flux_forward"](
            {name: tensor.to(dtype) for name, tensor in tensors.items()},
            tokens,
            ids,
            read.text.to(dtype),
            read.conditioning["pooled_output"].to(dtype),
            torch.tensor([sigma], dtype=dtype),
            torch.tensor([guidance], dtype=dtype),
            num_heads=len(tensors["img_in.weight"]) // 128,
            lora=lora,
        )[0, :keep]


def _samples(
    grids: Sequence[tuple[int, int]],
    references: Sequence[Sequence[tuple[int, int]]] | None = None,
    method: str | None = None,
    tokens: int | None = None,
) -> list[Any]:
    pairs = enumerate(zip(grids, references or [()] * len(grids), strict=True))
    return [
        flux_sample(f"{i}", *grid, 9 if sizes else 16, sizes, family="flux", method=method, tokens=tokens)
        for i, (grid, sizes) in pairs
    ]


def diffusers_rows(model: Any, native: dict[str, Tensor]) -> dict[str, Tensor]:
    """By ComfyUI's table, which has the names of FLUX.2 as well."""
    names = _empty_diffusers_model(model).state_dict().keys()
    rows = rows_by_table(model.model.model_config.unet_config, native)
    return {name: tensor for name, tensor in rows.items() if name in names}


def rows_by_table(config: dict[str, Any], native: dict[str, Tensor]) -> dict[str, Tensor]:
    """By `comfy.utils.flux_to_diffusers`; config: of a FLUX as ComfyUI detects it."""
    import comfy.utils

    rows = {}
    for key, target in comfy.utils.flux_to_diffusers(config).items():
        source, offset, function = (target, None, None) if isinstance(target, str) else (*target, None)[:3]
        if source not in native:
            continue
        tensor = native[source] if offset is None else native[source].narrow(*offset)
        rows[key] = tensor if function is None else function(tensor)
    return rows


def _diffusers_model(model: Any) -> Any:
    transformer = _empty_diffusers_model(model)
    transformer.load_state_dict(diffusers_rows(model, model.model.diffusion_model.state_dict()))
    return transformer.requires_grad_(False)


def _empty_diffusers_model(model: Any) -> Any:
    from diffusers import FluxTransformer2DModel

    params = model.model.diffusion_model.params
    return FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=1,
        joint_attention_dim=params.context_in_dim,
        pooled_projection_dim=params.vec_in_dim,
        guidance_embeds=params.guidance_embed,
    )


def norms_of_core(transformer: Any) -> None:
    """Core leaves the eps of FLUX's RMS norms to torch, which takes that of the dtype; diffusers writes it out."""
    for module in transformer.modules():
        if type(module).__name__ == "RMSNorm":
            module.eps = torch.finfo(transformer.dtype).eps


def _velocity(transformer: Any, sample: Any, x_t: Tensor, sigma: float, guidance: float) -> Tensor:
    """As FluxPipeline and, with a reference, FluxKontextPipeline call it."""
    from diffusers import FluxPipeline

    def packed(latent: Tensor) -> tuple[Tensor, Tensor]:
        c, h, w = latent.shape
        ids = FluxPipeline._prepare_latent_image_ids(1, h // 2, w // 2, "cpu", latent.dtype)
        return FluxPipeline._pack_latents(latent[None], 1, c, h, w), ids

    read, dtype = sample.load(), x_t.dtype
    tokens, ids = packed(x_t)
    for reference in read.conditioning.get("reference_latents", ()):
        reference_tokens, reference_ids = packed((reference[0].to(dtype) - 0.1159) * 0.3611)
        reference_ids[..., 0] = 1
        tokens, ids = torch.cat((tokens, reference_tokens), dim=1), torch.cat((ids, reference_ids))
    return transformer(
        hidden_states=tokens,
        encoder_hidden_states=read.text.to(dtype),
        pooled_projections=read.conditioning["pooled_output"].to(dtype),
        timestep=torch.tensor([sigma], dtype=dtype),
        img_ids=ids,
        txt_ids=torch.zeros(read.text.shape[1], 3),
        guidance=torch.tensor([guidance], dtype=dtype) if transformer.config.guidance_embeds else None,
    ).sample[0, : sample.tokens]


def mixed_samples(family: str, methods: Sequence[str | None], text: Callable[[int], int]) -> list[Any]:
    """12 pictures of seven shapes, all of 24 tokens, some with a ragged edge; a third has one reference, a third two.
    text: the length of the caption of each."""
    shapes = [(4, 6), (6, 4), (3, 8), (8, 3), (2, 12), (12, 2)]
    samples = []
    for i in range(12):
        grid, keep = (shapes[i % 6], None) if i % 4 else ((5, 5), 24)
        references = [(), [(6, 8)], [(4, 4), (8, 6)]][i % 3]
        if i % 6 >= 3:
            references = [side[::-1] for side in references]
        method = methods[i % 5 % 3]
        samples.append(flux_sample(f"{i}", *grid, text(i), references, family=family, method=method, tokens=keep))
    return samples


def _without_pooled(sample: Any) -> Any:
    read = sample.load()
    bare = replace(read, conditioning={n: t for n, t in read.conditioning.items() if n != "pooled_output"})
    return replace(sample, load=lambda *_: bare)


CASES = [
    Flux1Case(name="flux-dev", variant="dev", linears=2 + 3 * 2 + 2 * 10 + 2 * 3 + 2, targets=2 * 8 + 2 * 2),
    Flux1Case(
        name="flux-schnell",
        variant="schnell",
        linears=2 + 2 * 2 + 2 * 10 + 2 * 3 + 2,
        targets=2 * 8 + 2 * 2,
        left_out=dict.fromkeys((*SAME_SIZES, "learning"), "its blocks are those of dev"),
    ),
]

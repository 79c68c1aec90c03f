"""FLUX.1: dev, which Kontext's references go into as well, and schnell."""

import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import tiny
import torch
from tiny.family_case import SAME_SIZES, Batch, FamilyCase
from tiny.flux_data import flux_sample
from torch import Tensor

REFERENCE = runpy.run_path(str(Path(__file__).parents[1] / "reference" / "flux.py"))

# References in latent cells: the samples of a batch agree in their tokens one by one, and in nothing else.
WIDE, TALL, LONG = [(8, 4), (4, 6), (6, 6)], [(4, 8), (6, 4), (2, 18)], [(16, 2), (2, 12), (18, 2)]
# Where ComfyUI's `offset` puts two of them, by hand: (1, first row, first column) in tokens. The second goes below the
# first where both together are wider than high, else beside it.
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
    """What FLUX.1 and FLUX.2 share."""

    kinds = 2
    wide: ClassVar[Mapping[str, Any]] = {"hidden": 256}

    def core_velocity(
        self, model: Any, sample: Any, sigma: float, guidance: float = 1.0, x_t: Tensor | None = None
    ) -> Tensor:
        """A ragged edge by leaving its tokens out of core's sequence, after its cutting into tokens."""
        import comfy.model_management

        comfy.model_management.load_models_gpu([model])
        core, read, patch = model.model.diffusion_model, sample.load(), model.model.diffusion_model.patch_size
        x = (read.latent[None] if x_t is None else x_t).to(model.load_device)
        given = {**read.conditioning, "guidance": guidance}
        conds = model.model.extra_conds(cross_attn=read.text, noise=x, device=x.device, **given)
        args = {name: cond.process_cond(1, area=None, device=x.device).cond for name, cond in conds.items()}
        own, keep = x.shape[-2] * x.shape[-1] // patch**2, sample.tokens
        whole = core.forward_orig

        def on_kept_tokens(img: Tensor, img_ids: Tensor, *rest: Any, **options: Any) -> Tensor:
            there = torch.cat((torch.arange(keep), torch.arange(own, img.shape[1])))
            if options.get("timestep_zero_index") is not None:
                assert options["timestep_zero_index"] == [[own, img.shape[1]]]
                options["timestep_zero_index"] = [[keep, len(there)]]
            kept = whole(img[:, there], img_ids[:, there], *rest, **options)
            out = kept.new_zeros(1, img.shape[1], kept.shape[-1])
            out[:, there] = kept
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
    main_batches = ("shapes", "ragged references")

    def write(self, path: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
        return tiny.write_flux(path, guidance=self.variant == "dev", dtype=dtype, **sizes)

    def load(self, path: Path, dtype: torch.dtype | None = None) -> Any:
        return tiny.load_flux(path, dtype)

    def batches(self) -> dict[str, Batch]:
        three = (WIDE, TALL, LONG)
        one, two = ([given[:count] for given in three] for count in (1, 2))
        batches: dict[str, Batch] = {
            "shapes": partial(_samples, [(4, 12), (8, 6), (6, 8)]),
            "ragged": partial(_samples, [(4, 12), (8, 6), (6, 8)], tokens=45),
            "references": partial(_samples, GRIDS, two),
            "ragged references": partial(_samples, RAGGED, two, tokens=23),
            "without pooled text": lambda: [_without_pooled(s) if i == 1 else s for i, s in enumerate(_samples(GRIDS))],
        }
        for method in METHODS:
            name = method or "by default"
            batches[f"one {name}"] = partial(_samples, GRIDS, one, method)
            batches[f"three {name}"] = partial(_samples, GRIDS, three, method)
            batches[f"three {name}, ragged edge"] = partial(_samples, RAGGED, three, method, 23)
            batches[f"squares {name}"] = partial(_samples, [(4, 6)], [[(6, 6), (6, 6), (4, 4)]], method)
            odd = [[(7, 3), (5, 4)], [(3, 8), (4, 5)]]
            batches[f"odd sides {name}"] = partial(_samples, GRIDS[:2], odd, method)
        return batches

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
        read, keep, dtype = sample.load(), sample.tokens, x_t.dtype
        tokens, ids = (part[:, :keep] for part in placed(x_t, 2, (0, 0, 0)))
        references = read.conditioning.get("reference_latents", ())
        places = OFFSETS[tuple(tuple(r.shape[-2:]) for r in references)] if references else []
        for reference, place in zip(references, places, strict=True):
            more, more_ids = placed(self.in_model_space(reference[0].to(dtype)), 2, place)
            tokens, ids = torch.cat([tokens, more], dim=1), torch.cat([ids, more_ids], dim=1)
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
        flux_sample(f"{i}", *grid, 9 if given else 16, given, family="flux", method=method, tokens=tokens)
        for i, (grid, given) in pairs
    ]


def _without_pooled(sample: Any) -> Any:
    read = sample.load()
    bare = replace(read, conditioning={n: t for n, t in read.conditioning.items() if n != "pooled_output"})
    return replace(sample, load=lambda *_: bare)


CASES = [
    Flux1Case(name="flux-dev", variant="dev", linears=2 + 3 * 2 + 2 * 10 + 2 * 3 + 2),
    Flux1Case(
        name="flux-schnell",
        variant="schnell",
        linears=2 + 2 * 2 + 2 * 10 + 2 * 3 + 2,
        left_out=dict.fromkeys(SAME_SIZES, "its blocks are those of dev"),
    ),
]

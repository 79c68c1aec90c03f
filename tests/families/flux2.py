"""FLUX.2: dev and klein, with and without references."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tiny
import torch
from tessera.models.flux.family import resolution_shift
from tiny.family_case import SAME_SIZES, Batch
from tiny.flux_data import flux_sample
from torch import Tensor

from .flux import REFERENCE, FluxCase, placed, to_tokens

ZERO = "index_timestep_zero"
REFERENCES = [[(4, 6), (3, 3)], [(6, 4), (1, 9)], [(8, 3), (9, 1)]]
GRIDS, RAGGED = [(4, 6), (3, 8), (12, 2)], [(4, 6), (5, 5), (3, 8)]


@dataclass(frozen=True, kw_only=True)
class Flux2Case(FluxCase):
    family = "flux2"
    main_batches = ("shapes", "timestep zero")

    def write(self, path: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
        return tiny.write_flux2(path, guidance=self.variant == "dev", dtype=dtype, **sizes)

    def load(self, path: Path, dtype: torch.dtype | None = None) -> Any:
        return tiny.load_flux2(path, dtype)

    def batches(self) -> dict[str, Batch]:
        batches: dict[str, Batch] = {
            "shapes": partial(_samples, GRIDS),
            "ragged": partial(_samples, RAGGED, tokens=23),
            "index": partial(_samples, GRIDS, REFERENCES, "index"),
            "timestep zero": partial(_samples, GRIDS, REFERENCES, ZERO),
            "ragged timestep zero": partial(_samples, RAGGED, REFERENCES, ZERO, 23),
            "captions of 512 and more": lambda: [flux_sample(f"{i}", 2, 2, 700) for i in range(2)],
            "captions of 5 to 512": lambda: [flux_sample(f"{n}", 4, 6, n) for n in (5, 40, 512)],
            "several methods": lambda: [flux_sample(f"{m}", 4, 6, 9, [(6, 4)], method=m) for m in (ZERO, None, "uxo")],
        }
        for method in (None, "offset", "index", ZERO, "uxo"):
            name = method or "by default"
            batches[f"references {name}"] = partial(_samples, [(4, 6), (8, 3), (2, 12)], REFERENCES, method)
            batches[f"references {name}, ragged edge"] = partial(_samples, RAGGED, REFERENCES, method, 23)
        return batches

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
        """Captions are padded left to 512 tokens; references stand at 10 and 20 of the first axis."""
        read, keep, dtype = sample.load(), sample.tokens, x_t.dtype
        tokens, ids = (part[:, :keep] for part in placed(x_t, 1, (0, 0, 0, 0)))
        for i, reference in enumerate(read.conditioning.get("reference_latents", ())):
            more, more_ids = placed(reference[0].to(dtype), 1, (10 * (i + 1), 0, 0, 0))
            tokens, ids = torch.cat([tokens, more], dim=1), torch.cat([ids, more_ids], dim=1)
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


def _samples(grids: Any, references: Any = None, method: str | None = None, tokens: int | None = None) -> list[Any]:
    pairs = enumerate(zip(grids, references or [()] * 3, strict=True))
    return [flux_sample(f"{i}", *grid, 5 + 40 * i, given, method=method, tokens=tokens) for i, (grid, given) in pairs]


CASES = [
    Flux2Case(name="flux2-dev", variant="dev", linears=2 + 4 + 3 + 2 * 8 + 2 * 2 + 2),
    Flux2Case(
        name="flux2-klein",
        variant="klein",
        linears=2 + 2 + 3 + 2 * 8 + 2 * 2 + 2,
        left_out=dict.fromkeys(SAME_SIZES, "its blocks are those of dev"),
    ),
]

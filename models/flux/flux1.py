"""The FLUX.1 family: dev, schnell, Kontext."""

from collections.abc import Sequence
from typing import Any

import comfy.model_base
from torch import Tensor

from ..family import Origin, SampleFacts
from ..latents import FLUX
from .family import FluxFamily
from .tokens import TIMESTEP_ZERO
from .transformer import FluxTransformer

SCHNELL_TEXT_LENGTH = 256


class Flux(FluxFamily):
    """FLUX.1: dev, schnell, and every checkpoint of that shape. Kontext is one of them, which was trained to see
    reference pictures; nothing in its weights tells it from dev."""

    name = "flux"
    title = "FLUX.1"
    policy = FLUX
    transformer = FluxTransformer
    axes = 3

    def matches(self, model: Any) -> bool:
        """True for ComfyUI's FLUX.1; FLUX.2 and other models that subclass it run another forward."""
        if type(model) is not comfy.model_base.Flux:
            return False
        params = model.diffusion_model.params
        other = ("global_modulation", "mlp_silu_act", "yak_mlp", "txt_norm")
        return not any(getattr(params, name, False) for name in other) and not getattr(params, "txt_ids_dims", [])

    def variant(self, model: Any) -> str:
        """`dev` where the model takes guidance, else `schnell`."""
        return "dev" if model.diffusion_model.params.guidance_embed else "schnell"

    def origin(self, model: Any) -> Origin:
        url = "https://github.com/black-forest-labs/flux"
        return Origin(f"flux-1-{self.variant(model)}", url, "flux1", "networks.lora_flux")

    def shift(self, model: Any, tokens: int) -> float:
        return 1.0

    def text_length(self, model: Any, length: int) -> int:
        return length

    def notes(self, model: Any, samples: Sequence[SampleFacts]) -> list[str]:
        long = sum(sample.text_length > SCHNELL_TEXT_LENGTH for sample in samples)
        if self.variant(model) == "dev" or not long:
            return []
        return [
            f"{long} captions have more than {SCHNELL_TEXT_LENGTH} tokens, the length that FLUX.1 schnell was trained "
            f"with; set max_text_length to {SCHNELL_TEXT_LENGTH} on Prepare Dataset if this is schnell."
        ]

    def reference_method(self, method: str) -> str:
        if method == TIMESTEP_ZERO:
            raise ValueError(
                f"reference_latents_method is {TIMESTEP_ZERO}, which ComfyUI cannot run on FLUX.1; set it to offset, "
                "Kontext's own, on Edit Model Reference Method."
            )
        return method

    def reference_timestep(self, timestep: Tensor, methods: Sequence[str]) -> Tensor | None:
        return None

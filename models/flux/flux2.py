"""The FLUX.2 family: dev and klein."""

from collections.abc import Sequence
from typing import Any

import comfy.model_base

from ..family import Origin, SampleFacts
from ..latents import FLUX2
from ..layers.math import resolution_shift
from .family import FluxFamily
from .transformer import Flux2Transformer

TEXT_LENGTH = 512  # black-forest-labs/flux2, src/flux2/text_encoder.py: MAX_LENGTH
# Hidden sizes of the models without guidance (musubi-tuner, flux_2/flux2_models.py: Klein4BParams, Klein9BParams). The
# distilled ones have the weights' shapes of the base ones.
KLEIN = {3072: "klein-4b", 4096: "klein-9b"}


class Flux2(FluxFamily):
    """FLUX.2: dev, klein and klein base. All of them see reference pictures."""

    name = "flux2"
    title = "FLUX.2"
    policy = FLUX2
    transformer = Flux2Transformer
    axes = 4

    def matches(self, model: Any) -> bool:
        if type(model) is not comfy.model_base.Flux2:
            return False
        params = model.diffusion_model.params
        other = any(getattr(params, name, False) for name in ("yak_mlp", "txt_norm"))
        return params.global_modulation and params.mlp_silu_act and not other

    def variant(self, model: Any) -> str:
        """`dev` where the model takes guidance, else `klein-4b` or `klein-9b`, or `klein` for one of another size."""
        params = model.diffusion_model.params
        return "dev" if params.guidance_embed else KLEIN.get(params.hidden_size, "klein")

    def origin(self, model: Any) -> Origin:
        """As musubi-tuner writes it (utils/sai_model_spec.py, dataset/architectures.py)."""
        variant, url = self.variant(model), "https://github.com/black-forest-labs/flux2"
        return Origin(f"Flux.2-{variant}", url, f"flux_2_{variant.replace('-', '_')}", "networks.lora_flux_2")

    def shift(self, model: Any, tokens: int) -> float:
        """musubi-tuner's docs/flux_2.md trains with `--timestep_sampling flux2_shift`, which is exp(mu) of FLUX.1's
        sampler at FLUX.2's token count; FLUX.2's own sampler comes to that line at 200 steps
        (black-forest-labs/flux2, src/flux2/sampling.py, compute_empirical_mu)."""
        return resolution_shift(tokens)

    def text_length(self, model: Any, length: int) -> int:
        """Core fills up to 512 with zeros on the left, and cuts nothing."""
        return max(TEXT_LENGTH, length)

    def notes(self, model: Any, samples: Sequence[SampleFacts]) -> list[str]:
        long = [sample for sample in samples if sample.text_length > TEXT_LENGTH]
        if not long:
            return []
        return [
            f"{len(long)} captions have more than {TEXT_LENGTH} tokens, the length that FLUX.2 was trained with; each "
            "length beyond it is compiled on its own. Shorten them."
        ]

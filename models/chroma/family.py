"""The family of Chroma: lodestones' Chroma1 (HD, Base, Flash) and its fine-tunes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import comfy.ldm.chroma.model
import comfy.model_base
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor
from torch.nn import functional as F

from ...common.text import quantity
from ...memory.weights.frozen import FrozenWeights
from ..conditioning import model_conditioning
from ..family import NoisySample, Origin, SampleFacts, SamplingFacts, UsualSettings
from ..flux.family import SWAP_ORDER, FluxConditioning, FluxFamily, FluxForward
from .names import CHROMA_NAMES
from .text import ChromaText
from .transformer import APPROXIMATOR, ChromaInputs, ChromaTransformer

TEXT_LENGTH = 512  # the maximum of diffusers' ChromaPipeline


class ChromaConditioning(FluxConditioning):
    """Guidance is no input of a distilled model, and there is no pooled text."""

    def takes_guidance(self, model: Any) -> bool:
        return False

    def pooled_width(self, model: Any) -> int:
        return 0


class ChromaForward(FluxForward):
    """Forward of Chroma, which masks the pads of captions."""

    def transformer(self, model: Any, weights: FrozenWeights, attention: Any) -> ChromaTransformer:
        return ChromaTransformer(weights, model.diffusion_model, attention)

    def as_core_takes(self, sample: NoisySample) -> NoisySample:
        """Set guidance to 0 if the sample has none, as core's sampler does."""
        guidance = sample.conditioning.get("guidance")
        return replace(sample, conditioning={**sample.conditioning, "guidance": 0.0 if guidance is None else guidance})

    def inputs(
        self, patcher: ModelPatcher, samples: Sequence[NoisySample], sigma: Tensor, guidance: float
    ) -> ChromaInputs:
        """Collate the batch. A sample's guidance is that of its conditioning, or 0, as in ComfyUI's sampling.

        sigma: (B,) fp32.
        guidance: not used, it is for distilled models.
        """
        device, dtype = sigma.device, patcher.model.get_dtype_inference()
        length = samples[0].text_length
        patches = []
        texts = []
        guidances = []
        for sample in samples:
            stored_guidance = sample.conditioning.get("guidance")
            sample_guidance = 0.0 if stored_guidance is None else stored_guidance
            cond = model_conditioning(
                patcher.model, sample.latent, sample.text, sample.conditioning, sample_guidance, device
            )
            if "attention_mask" in cond:
                raise ValueError("positive carries an attention mask, which Chroma training does not take; remove it.")
            patches.append(self.patchify(sample.latent.to(dtype), sample.tokens))
            texts.append(cond["c_crossattn"][0])
            guidances.append(cond["guidance"])
        assert all(len(text) <= length for text in texts), (length, [len(text) for text in texts])
        lengths = [len(p.tokens) + len(text) for p, text in zip(patches, texts, strict=True)]
        # Core casts the text and the guidance; sigma stays fp32 up to the embedding.
        timestep = patcher.get_model_object("model_sampling").timestep(sigma).float()
        return ChromaInputs(
            tokens=torch.stack([p.tokens for p in patches]),
            positions=torch.stack([F.pad(p.positions, (0, 0, 0, length)) for p in patches]),  # text positions are zero
            text=torch.stack([F.pad(text, (0, 0, 0, length - len(text))) for text in texts]),
            lengths=torch.tensor(lengths, dtype=torch.int64, device="cpu"),
            timestep=patcher.model.process_timestep(timestep),
            guidance=torch.cat(guidances),
        )


class Chroma(FluxFamily):
    """Chroma takes T5's text only, each caption in its own length, and guidance 0 by default. Radiance, which works on
    pixels, has its own class in ComfyUI and is another family."""

    name = "chroma"
    title = "Chroma"
    releases = "HD, Base, Flash"
    model_class = comfy.model_base.Chroma
    transformer_class = comfy.ldm.chroma.model.Chroma
    text = ChromaText()
    names = CHROMA_NAMES
    usual = UsualSettings(file_names="chroma", pictures_only=True)  # learning rate: ai-toolkit's examples
    sampling = SamplingFacts(text.latents[0])
    conditioning = ChromaConditioning(text)
    forward = ChromaForward(title, SWAP_ORDER, text, ragged=True, axes=3)
    never_trained = (f"{APPROXIMATOR}.*",)

    def origin(self, model: Any) -> Origin:
        """Return the origin as kohya's sd-scripts writes it (library/sai_model_spec.py, library/flux_utils.py)."""
        return Origin("chroma", "https://huggingface.co/lodestones/Chroma", "chroma", "networks.lora_flux")

    def check(self, model: Any, sample: SampleFacts) -> None:
        super().check(model, sample)
        if sample.references:
            raise ValueError(
                f"{sample.name} has reference pictures, which Chroma can't use; prepare the data without "
                "control_folder, or connect FLUX.1 Kontext."
            )

    def notes(self, model: Any, samples: Sequence[SampleFacts]) -> list[str]:
        long = sum(sample.text_length > TEXT_LENGTH for sample in samples)
        if not long:
            return []
        captions = quantity(long, "caption has", "captions have")
        return [f"{captions} more than {TEXT_LENGTH} tokens, the most that Chroma is made for; shorten them."]


FAMILIES = (Chroma(),)

"""Training Preview: prompts that are sampled while Train LoRA trains."""

from collections.abc import Sequence
from typing import Any

import comfy.samplers
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

from ...train.preview.sampling import MOST_SEED, Conditioning, Sampling
from ...train.watch.previewer import Preview
from ..common.types import PreviewType


def sampler_inputs() -> list[io.Input]:
    """Build the sampler inputs, as on core's KSampler."""
    return [
        io.Int.Input(
            "width",
            default=1024,
            min=16,
            max=16384,
            step=16,
            tooltip="Pixels. A smaller size shows as much of a LoRA in less time. Not used if latent_image is "
            "connected.",
        ),
        io.Int.Input(
            "height",
            default=1024,
            min=16,
            max=16384,
            step=16,
            tooltip="Pixels, as for width.",
        ),
        io.Int.Input(
            "steps",
            default=20,
            min=1,
            max=10000,
            tooltip="Steps of the sampler for each picture, as on your KSampler.",
        ),
        io.Float.Input(
            "cfg",
            default=1.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.01,
            tooltip="As on your KSampler: 1 for FLUX.1 (the negative prompt is then not used); 2.5 to 5 for "
            "Qwen-Image and Wan, which takes twice as long.",
        ),
        io.Combo.Input(
            "sampler_name",
            options=list(comfy.samplers.KSampler.SAMPLERS),
            default="euler",
            advanced=True,
            tooltip="As on your KSampler.",
        ),
        io.Combo.Input(
            "scheduler",
            options=list(comfy.samplers.KSampler.SCHEDULERS),
            default="simple",
            advanced=True,
            tooltip="As on your KSampler.",
        ),
        io.Int.Input(
            "seed",
            default=0,
            min=0,
            max=MOST_SEED,
            control_after_generate=io.ControlAfterGenerate.fixed,
            advanced=True,
            tooltip="The seed of the noise. It is the same in every preview, so only the LoRA differs.",
        ),
        io.Int.Input(
            "seeds",
            default=1,
            min=1,
            max=16,
            advanced=True,
            tooltip="How many pictures of this prompt: seed, seed + 1 and so on, each in its own row.",
        ),
        io.Conditioning.Input(
            "negative",
            optional=True,
            tooltip="The negative prompt, for a cfg above 1. Not connected it is zeros, like Conditioning Zero Out.",
        ),
        io.Latent.Input(
            "latent_image",
            optional=True,
            tooltip="A latent to start from instead of width, height and frames, such as Wan's empty video latent.",
        ),
        io.Int.Input(
            "frames",
            default=1,
            min=1,
            max=16384,
            optional=True,
            advanced=True,
            tooltip="Frames of a clip, such as 33 for Wan; 1 for pictures.",
        ),
        io.String.Input(
            "label",
            default="",
            optional=True,
            advanced=True,
            tooltip="The name of this prompt on sheets. Empty: prompt 1, prompt 2 and so on.",
        ),
    ]


class TesseraPreview(io.ComfyNode):
    """One prompt that is sampled every so many steps; several of these nodes chain."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraPreview",
            display_name="Training Preview",
            category="Tessera/training",
            description="Samples a prompt while Train LoRA trains, with the LoRA so far, and shows the pictures as a "
            "sheet over the steps. Chain several nodes for several prompts.",
            search_aliases=["sample images", "training samples", "preview lora", "sample prompts"],
            inputs=[
                io.Vae.Input("vae", tooltip="The model's own VAE, which decodes the pictures."),
                io.Conditioning.Input(
                    "positive",
                    tooltip="The prompt, as you would connect it to KSampler (for FLUX.1 with FluxGuidance). Write "
                    "it as you will use the LoRA, with its trigger words.",
                ),
                io.Int.Input(
                    "every_n_steps",
                    default=250,
                    min=0,
                    max=1_000_000,
                    tooltip="Training steps between previews; the last step always has one. 0: only at the end. Set "
                    "it to save_every or a multiple of it, so that each column belongs to a saved LoRA.",
                ),
                io.Boolean.Input(
                    "at_start",
                    default=True,
                    tooltip="Adds a preview before the first step: the picture without the LoRA, to compare with.",
                ),
                *sampler_inputs(),
                io.Float.Input(
                    "fps",
                    default=16.0,
                    min=1.0,
                    max=120.0,
                    step=1.0,
                    optional=True,
                    advanced=True,
                    tooltip="Frames per second of a clip's file: 16 for Wan 2.1 and 2.2 14B, 24 for Wan 2.2 5B.",
                ),
                io.Boolean.Input(
                    "use_ema",
                    default=True,
                    optional=True,
                    advanced=True,
                    tooltip="On: the LoRA as it would be saved, averaged if ema_decay is set on Optimizer. Off: the "
                    "current weights. Without an average both are the same.",
                ),
                PreviewType.Input(
                    "preview", optional=True, tooltip="Another Training Preview; its prompts come first."
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="Another MODEL to sample this prompt on: train on the base model and look at the LoRA on "
                    "the turbo model, with its steps and cfg. Not connected it is the model that you train.",
                ),
            ],
            outputs=[PreviewType.Output(display_name="preview")],
        )

    @classmethod
    def execute(
        cls,
        vae: Any,
        positive: Conditioning,
        every_n_steps: int,
        at_start: bool,
        use_ema: bool = True,
        preview: Sequence[Preview] = (),
        model: ModelPatcher | None = None,
        **sampler: Any,
    ) -> io.NodeOutput:
        sampling = Sampling(vae, positive, **sampler)
        return io.NodeOutput((*preview, Preview(sampling, every_n_steps, at_start, use_ema, model)))


NODES: list[type[io.ComfyNode]] = [TesseraPreview]

"""Training Objective: timestep sampling and loss."""

from typing import Any

from comfy_api.latest import io

from ...train.objective.options import LOSSES, TIMESTEP_SAMPLING, ObjectiveOptions
from ...train.objective.plot import plot_distribution
from ..common.images import image_tensor
from ..common.types import ObjectiveType
from .objective_inputs import loss_terms, noise_levels


class TesseraObjective(io.ComfyNode):
    """Options of timestep sampling and loss."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraObjective",
            display_name="Training Objective",
            category="Tessera/training",
            description="Sets which noise levels are trained most and how the loss is computed, and shows the levels "
            "as a chart. Connect it to Train LoRA.",
            search_aliases=["timestep sampling", "sigma", "shift", "guidance", "huber", "min snr", "noise offset"],
            inputs=[
                io.Combo.Input(
                    "timestep_sampling",
                    options=list(TIMESTEP_SAMPLING),
                    default=ObjectiveOptions.timestep_sampling,
                    tooltip="How often each noise level is trained. logit_normal: mostly the middle ones, good for "
                    "nearly everything. uniform: all equally, more fine detail. resolution_shifted: more noise for "
                    "larger pictures, like FLUX's sampler, good for composition and likeness; resolution_flux2 and "
                    "resolution_qwen do what those samplers do. sigmoid, mode, logsnr, beta, custom: set by the "
                    "inputs with these names.",
                ),
                io.Float.Input(
                    "shift",
                    default=ObjectiveOptions.shift,
                    min=0.0,
                    max=100.0,
                    step=0.05,
                    round=False,
                    tooltip="Moves the noise levels: above 1 towards noise (composition), below 1 towards the "
                    "picture (detail). 0 uses what suits the model (no shift for logsnr and custom); any other value "
                    "also replaces the shift of the resolution_ samplings.",
                ),
                io.Combo.Input(
                    "loss",
                    options=list(LOSSES),
                    default=ObjectiveOptions.loss,
                    tooltip="How the error is measured. mse: mean square, the usual one. huber, pseudo_huber: like "
                    "mse for errors below huber_c and like l1 above, so odd pictures have less influence. l1: mean "
                    "absolute error.",
                ),
                io.Float.Input(
                    "guidance",
                    default=ObjectiveOptions.guidance,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=False,
                    tooltip="The guidance input of models such as FLUX.1 dev while training. 1 is right for LoRAs, "
                    "whatever guidance you sample with later. Other models ignore it.",
                ),
                *noise_levels(),
                *loss_terms(),
                io.Float.Input(
                    "preservation_weight",
                    default=ObjectiveOptions.preservation_weight,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=False,
                    optional=True,
                    tooltip="Differential output preservation: what the model makes of class_word (of Training "
                    "Images) stays as it was. 0 is off. With 1, other people keep their faces while one person is "
                    "learnt; a step takes about twice as long.",
                ),
                io.Float.Input(
                    "guidance_loss_scale",
                    default=ObjectiveOptions.guidance_loss_scale,
                    min=0.0,
                    max=100.0,
                    step=0.05,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="Experimental. Preserves the guidance of a guidance-distilled model, which plain "
                    "training removes. 0 is off. For a guidance of G use 2 - 1/G: 1.7 for 3.5; more adds some. Needs "
                    "encode_empty_caption on Prepare Dataset, and runs the model twice more per step.",
                ),
            ],
            outputs=[
                ObjectiveType.Output(display_name="objective"),
                io.Image.Output(
                    display_name="distribution", tooltip="A chart of how often each noise level is trained."
                ),
            ],
        )

    # A coroutine, as ComfyUI runs those first: errors here are raised before anything is loaded or encoded.
    @classmethod
    async def execute(cls, **inputs: Any) -> io.NodeOutput:
        options = ObjectiveOptions(**inputs)  # each input has the name of its field
        return io.NodeOutput(options, image_tensor(plot_distribution(options)))


NODES: list[type[io.ComfyNode]] = [TesseraObjective]

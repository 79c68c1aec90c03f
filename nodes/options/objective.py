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
            description="Sets which noise levels are trained most and what the loss is, and shows the levels as a "
            "picture. Connect it to Train LoRA.",
            search_aliases=["timestep sampling", "sigma", "shift", "guidance", "huber", "min snr", "noise offset"],
            inputs=[
                io.Combo.Input(
                    "timestep_sampling",
                    options=list(TIMESTEP_SAMPLING),
                    default=ObjectiveOptions.timestep_sampling,
                    tooltip="How often each noise level is trained. logit_normal: mostly the middle ones, good for "
                    "nearly all. uniform: all alike, more fine detail. resolution_shifted: more noise for larger "
                    "pictures, as FLUX's sampler does, good for composition and likeness; resolution_flux2 and "
                    "resolution_qwen as those samplers do. sigmoid, mode, logsnr, beta, custom: the shapes of the "
                    "inputs with these names.",
                ),
                io.Float.Input(
                    "shift",
                    default=ObjectiveOptions.shift,
                    min=0.0,
                    max=100.0,
                    step=0.05,
                    round=False,
                    tooltip="Moves the noise levels: above 1 towards noise (composition), below 1 towards the picture "
                    "(detail). 0 takes what suits the model, and none for logsnr and custom; any other value also "
                    "replaces the shift of the resolution_ samplings.",
                ),
                io.Combo.Input(
                    "loss",
                    options=list(LOSSES),
                    default=ObjectiveOptions.loss,
                    tooltip="How the velocity's error is measured. mse: its mean square. huber, pseudo_huber: as mse "
                    "for errors below huber_c, as l1 above, so that odd pictures pull less. l1: its mean size.",
                ),
                io.Float.Input(
                    "guidance",
                    default=ObjectiveOptions.guidance,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=False,
                    tooltip="What a guidance-distilled model such as FLUX.1 dev is told while it trains; 1 suits "
                    "LoRAs, whatever guidance you sample with later. Models without this input do not read it.",
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
                    tooltip="Differential output preservation: holds what the model makes of class_word (of Training "
                    "Images) to what it made before. 0 is off. 1 keeps other people as they were while one person is "
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
                    tooltip="Experimental. Leaves the guidance in a guidance-distilled model, which plain training "
                    "takes out. 0 is off. Of a model that holds a guidance of G, 2 - 1/G keeps it: 1.7 for 3.5; more "
                    "adds some. Takes encode_empty_caption on Prepare Dataset, and two more forwards a step.",
                ),
            ],
            outputs=[
                ObjectiveType.Output(display_name="objective"),
                io.Image.Output(display_name="distribution", tooltip="The noise levels that are drawn, as a picture."),
            ],
        )

    # A coroutine, as ComfyUI runs those first: what is wrong here is told before anything is loaded or encoded.
    @classmethod
    async def execute(cls, **chosen: Any) -> io.NodeOutput:
        options = ObjectiveOptions(**chosen)  # each input has the name of its field
        return io.NodeOutput(options, image_tensor(plot_distribution(options)))


NODES: list[type[io.ComfyNode]] = [TesseraObjective]

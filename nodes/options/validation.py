"""Validation: the loss on held-out images while Train LoRA trains."""

from comfy_api.latest import io

from ...data.samples import TrainingData
from ...train.config.settings import MOST_HELD_OUT, ValidationOptions
from ..common.types import TrainingDataType, ValidationType


class TesseraValidation(io.ComfyNode):
    """Options of the held-out split and its schedule."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraValidation",
            display_name="Validation",
            category="Tessera/training",
            description="Sets some pictures aside and measures the loss on them at fixed noise levels, so you can "
            "compare runs and save the best LoRA. Connect it to Train LoRA.",
            search_aliases=["validation loss", "held out", "evaluation", "overfitting", "keep best"],
            inputs=[
                io.Float.Input(
                    "part",
                    default=ValidationOptions.part,
                    min=0.01,
                    max=MOST_HELD_OUT,
                    step=0.01,
                    round=False,
                    tooltip="The part of the pictures that is set aside and not trained on, at least one. All clips "
                    "of one video go together. Raise it for few pictures, lower it for many: each one costs nine "
                    "forward passes per measurement. Not used if data is connected.",
                ),
                io.Int.Input(
                    "every_n_steps",
                    default=ValidationOptions.every_n_steps,
                    min=1,
                    max=1_000_000,
                    tooltip="Optimizer steps between two measurements; the last step always has one. Lower it to see "
                    "sooner when the loss starts to rise, raise it if measuring takes too long.",
                ),
                io.Boolean.Input(
                    "at_start",
                    default=ValidationOptions.at_start,
                    tooltip="Also measures before the first step, without the LoRA, to compare with.",
                ),
                io.Boolean.Input(
                    "keep_best",
                    default=ValidationOptions.keep_best,
                    tooltip="Saves the LoRA with the lowest validation loss as <name>-best.safetensors. Switch it "
                    "off to save the disk space of one LoRA.",
                ),
                io.Int.Input(
                    "seed",
                    default=ValidationOptions.seed,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=io.ControlAfterGenerate.fixed,
                    tooltip="Decides which pictures are set aside and the noise on them. Use the same in all runs "
                    "that you want to compare; it is independent of the training seed.",
                ),
                io.Float.Input(
                    "min_sigma",
                    default=ValidationOptions.min_sigma,
                    min=0.0,
                    max=0.99,
                    step=0.001,
                    round=False,
                    tooltip="Lower end of the noise levels measured at, 0 (the picture) to 1 (noise): nine levels, "
                    "evenly spread from min_sigma to max_sigma. Raise it for a high noise expert trained alone.",
                    advanced=True,
                ),
                io.Float.Input(
                    "max_sigma",
                    default=ValidationOptions.max_sigma,
                    min=0.01,
                    max=1.0,
                    step=0.001,
                    round=False,
                    tooltip="Upper end of the noise levels measured at. Lower it for a low noise expert trained "
                    "alone; with both experts connected each uses its own side.",
                    advanced=True,
                ),
                TrainingDataType.Input(
                    "data",
                    optional=True,
                    tooltip="Separate pictures to measure on, from another Prepare Dataset; then all training data "
                    "is trained on. Connect it to compare runs with different training data.",
                ),
                io.String.Input(
                    "sigmas",
                    default="",
                    optional=True,
                    tooltip="Noise levels to measure at instead of the nine, such as 0.2, 0.5, 0.8, above 0 (the "
                    "picture) and up to 1 (noise); only those from min_sigma to max_sigma count. Fewer levels "
                    "measure faster. Empty uses the nine.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "loss_by_picture",
                    default=ValidationOptions.loss_by_picture,
                    optional=True,
                    tooltip="Also measures single training pictures, with the LoRA and without it, for up to 5 % of "
                    "the run's work: which learn, which resist (often a wrong caption), and which pull away from the "
                    "pictures set aside. The Loss by Picture node shows them. The LoRA stays the same.",
                ),
            ],
            outputs=[ValidationType.Output(display_name="validation", tooltip="For Train LoRA.")],
        )

    @classmethod
    def execute(
        cls,
        part: float,
        every_n_steps: int,
        at_start: bool,
        keep_best: bool,
        seed: int,
        min_sigma: float,
        max_sigma: float,
        data: TrainingData | None = None,
        sigmas: str = "",
        loss_by_picture: bool = False,
    ) -> io.NodeOutput:
        return io.NodeOutput(
            ValidationOptions(
                part,
                every_n_steps,
                at_start,
                keep_best,
                seed,
                min_sigma,
                max_sigma,
                data,
                sigmas,
                loss_by_picture,
            )
        )


NODES: list[type[io.ComfyNode]] = [TesseraValidation]

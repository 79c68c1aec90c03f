"""Validation: the loss on held-out images while Train LoRA trains."""

from comfy_api.latest import io

from ...data.samples import TrainingData
from ...train.settings import MOST_HELD_OUT, ValidationOptions
from ..common.types import TrainingDataType, ValidationType


class TesseraValidation(io.ComfyNode):
    """Options of the held-out split and of when it is measured."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraValidation",
            display_name="Validation",
            category="Tessera/training",
            description="Holds pictures out of training and measures the loss on them at fixed noise levels, so that "
            "two runs can be compared and the best LoRA kept. Connect it to Train LoRA.",
            search_aliases=["validation loss", "held out", "evaluation", "overfitting", "keep best"],
            inputs=[
                io.Float.Input(
                    "part",
                    default=ValidationOptions.part,
                    min=0.01,
                    max=MOST_HELD_OUT,
                    step=0.01,
                    round=False,
                    tooltip="The part of the pictures that is held out and not trained on; at least one. All "
                    "clips of a film leave together. Raise it for few pictures, lower it for many: each one costs nine "
                    "forward passes at each measurement. Not read where data is connected.",
                ),
                io.Int.Input(
                    "every_n_steps",
                    default=ValidationOptions.every_n_steps,
                    min=1,
                    max=1_000_000,
                    tooltip="Optimizer steps between two measurements; the last step always has one. Lower it to see "
                    "sooner where the loss turns, raise it where measuring takes too long.",
                ),
                io.Boolean.Input(
                    "at_start",
                    default=ValidationOptions.at_start,
                    tooltip="Also measures before the first step: the model without the LoRA, to compare with.",
                ),
                io.Boolean.Input(
                    "keep_best",
                    default=ValidationOptions.keep_best,
                    tooltip="Keeps the LoRA with the least validation loss as <name>-best.safetensors. Switch it off "
                    "to save the disk space of one LoRA.",
                ),
                io.Int.Input(
                    "seed",
                    default=ValidationOptions.seed,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=io.ControlAfterGenerate.fixed,
                    tooltip="Fixes which pictures are held out and the noise on them. Leave it the same in all runs "
                    "that you want to compare; it is apart from the seed of training.",
                ),
                io.Float.Input(
                    "min_sigma",
                    default=ValidationOptions.min_sigma,
                    min=0.0,
                    max=0.99,
                    step=0.001,
                    round=False,
                    tooltip="Lower end of the noise levels measured at, 0 (the picture) to 1 (noise): they are the "
                    "nine deciles between min_sigma and max_sigma. Raise it for a high noise expert trained alone.",
                    advanced=True,
                ),
                io.Float.Input(
                    "max_sigma",
                    default=ValidationOptions.max_sigma,
                    min=0.01,
                    max=1.0,
                    step=0.001,
                    round=False,
                    tooltip="Upper end of the noise levels measured at. Lower it for a low noise expert trained alone; "
                    "with both experts connected each takes its own side.",
                    advanced=True,
                ),
                TrainingDataType.Input(
                    "data",
                    optional=True,
                    tooltip="Pictures of their own to measure on, from another Prepare Dataset; nothing is held out of "
                    "the training data then. Connect it to compare runs whose training data differ.",
                ),
                io.String.Input(
                    "sigmas",
                    default="",
                    optional=True,
                    tooltip="Noise levels to measure at in place of the nine, such as 0.2, 0.5, 0.8, above 0 (the "
                    "picture) and up to 1 (noise); of them those from min_sigma to max_sigma count. Fewer of them make "
                    "a measurement faster. Empty takes the nine.",
                    advanced=True,
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
    ) -> io.NodeOutput:
        given = ValidationOptions(part, every_n_steps, at_start, keep_best, seed, min_sigma, max_sigma, data, sigmas)
        return io.NodeOutput(given)


NODES: list[type[io.ComfyNode]] = [TesseraValidation]

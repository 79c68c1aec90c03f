"""Inputs of Train LoRA."""

from comfy_api.latest import io

from ...common.text import joined
from ...lora.options import NetworkOptions
from ...models.catalogue.registry import titles
from ...train.checkpoint.resume import list_states
from ...train.config.settings import MemoryOptions, TrainSettings, ValidationOptions
from ...train.distributed.device_list import THIS_ONE
from ...train.objective.options import ObjectiveOptions
from ...train.optim.options import OptimizerOptions
from ..common.types import (
    MemoryType,
    NetworkType,
    ObjectiveType,
    OptimizerType,
    PreviewType,
    TrainingDataType,
    ValidationType,
)
from ..queue.turns import FINISH_FIRST, LET_PASS, MINUTES
from .presets import CUSTOM, PRESETS, for_the_browser
from .run import runs_folder


def train_inputs() -> list[io.Input]:
    """Build all inputs, in the order of saved workflows."""
    return [
        io.Model.Input(
            "model",
            tooltip=f"The model to train on, from any loader: {joined(titles())}, a fine-tune of one, or any other "
            "model of pictures or video. LoRAs on it stay active; a Compile Model node in front sets how it compiles.",
        ),
        TrainingDataType.Input("data", tooltip="From Prepare Dataset or Latents to Training Data."),
        io.String.Input(
            "output_name",
            default="my_lora",
            tooltip="Name of the LoRA file. You can put a subfolder in front: styles/my_lora.",
        ),
        io.Int.Input(
            "steps",
            default=1000,
            min=1,
            max=1_000_000,
            tooltip="Optimizer steps. 1000 to 2000 are good for 10 to 30 pictures; to train longer, raise it and "
            "press Run again.",
        ),
        io.Float.Input(
            "learning_rate",
            default=1e-4,
            min=1e-7,
            max=10.0,
            step=1e-6,
            round=False,
            tooltip="Size of each step. Lower it if pictures get oversharp or the loss jumps. If Optimizer is "
            "connected, its learning_rate is used instead.",
        ),
        io.Int.Input(
            "rank",
            default=16,
            min=1,
            max=1024,
            tooltip="How much the LoRA can learn: 8 to 32 for a person or a style, more for a lot of detail; the "
            "file grows with it. Alpha equals rank. If LoRA Network is connected, its rank is used instead.",
        ),
        io.Int.Input(
            "batch_size",
            default=1,
            min=1,
            max=256,
            tooltip="Pictures trained at once; they can have different aspect ratios. More needs more memory.",
        ),
        io.Int.Input(
            "gradient_accumulation",
            default=1,
            min=1,
            max=1024,
            tooltip="Batches per optimizer step: the effect of a larger batch without the extra memory, at the same "
            "time per picture.",
            advanced=True,
        ),
        io.Int.Input(
            "seed",
            default=0,
            min=0,
            max=0xFFFFFFFFFFFFFFFF,
            control_after_generate=io.ControlAfterGenerate.fixed,
            advanced=True,
            tooltip="Fixes the LoRA's start, the order of the pictures, the noise and the noise levels.",
        ),
        io.Combo.Input(
            "compile",
            options=["auto", "off"],
            default="auto",
            advanced=True,
            tooltip="auto compiles each block type once, in the first step, and trains faster from then on, with the "
            "settings of a Compile Model node in front if there is one. If no compiler works it says so and trains "
            "uncompiled. off is for short tries.",
        ),
        io.Int.Input(
            "save_every",
            default=250,
            min=0,
            max=1_000_000,
            tooltip="Steps between saves of the LoRA and of the state to resume from. 0 saves only at the end, at "
            "Cancel and at an error; a crash then loses the run.",
        ),
        io.Combo.Input(
            "resume",
            options=["latest", "off", *list_states(runs_folder())],
            default="latest",
            tooltip="latest continues from the newest saved state of the same run, if there is one. off starts from "
            "step 0 in a new folder. Or choose a state to continue from. A finished run is always returned as it is; "
            "to train it again, change seed or output_name.",
            advanced=True,
        ),
        NetworkType.Input("network", optional=True, tooltip="From LoRA Network: rank, alpha, targets, dropout."),
        OptimizerType.Input("optimizer", optional=True, tooltip="From Optimizer; not connected it is AdamW."),
        ObjectiveType.Input(
            "objective", optional=True, tooltip="From Training Objective: which noise levels are trained."
        ),
        MemoryType.Input(
            "memory",
            optional=True,
            tooltip="From Training Memory; not connected, checkpointing is auto: the fastest that fits.",
        ),
        io.Model.Input(
            "model_low_noise",
            optional=True,
            tooltip="Wan 2.2's low noise expert, with the high noise one at model: both are trained, one after the "
            "other, each for all steps and on its own noise levels. Leave it empty for all other models.",
        ),
        PreviewType.Input(
            "preview",
            optional=True,
            tooltip="From Training Preview: prompts that are sampled while it trains, shown on this node. They don't "
            "change the training.",
        ),
        ValidationType.Input(
            "validation",
            optional=True,
            tooltip="From Validation: the loss on pictures that are not trained on, and the best LoRA by it.",
        ),
        io.Int.Input(
            "save_every_epochs",
            default=TrainSettings.save_every_epochs,
            min=0,
            max=1_000_000,
            optional=True,
            tooltip="Saves every so many epochs instead of save_every, which must be 0 then. An epoch shows every "
            "picture once, times its repeats (with sample_ratio only that part of a folder), and as many "
            "regularisation pictures again if there are any. 0 is off.",
            advanced=True,
        ),
        io.Int.Input(
            "keep_last",
            default=TrainSettings.keep_last,
            min=0,
            max=1_000_000,
            optional=True,
            tooltip="How many of the LoRAs saved on the way stay on disk (the newest ones); 0 keeps all. The "
            "finished and the best LoRA always stay. Average States needs all LoRAs that it should average.",
            advanced=True,
        ),
        io.String.Input(
            "devices",
            default=THIS_ONE,
            optional=True,
            tooltip="The GPUs to train on together: 'this one', 'all', or their numbers, such as 0,1. The LoRA is the "
            "same, in less time: batch_size stays the whole batch, which they share. See docs/many_cards.md.",
            advanced=True,
        ),
        io.Combo.Input(
            "preset",
            options=[CUSTOM, *PRESETS],
            default=CUSTOM,
            optional=True,
            tooltip="Fills in steps, learning_rate, rank and gradient_accumulation for what you train and for your "
            "model. Change any of them afterwards and this turns to custom. Use one if you don't know what to set.",
            extra_dict=for_the_browser(),
        ),
        io.Combo.Input(
            "while_others_wait",
            options=[FINISH_FIRST, LET_PASS],
            default=FINISH_FIRST,
            optional=True,
            tooltip="What to do when other prompts wait in the queue. 'let them pass' saves after the current step, "
            "lets them run, and goes on by itself. The LoRA is the same. Each pause takes the time of saving and "
            "loading.",
            advanced=True,
        ),
        io.Float.Input(
            "minutes_between_pauses",
            default=MINUTES,
            min=0.0,
            max=1440.0,
            step=0.5,
            optional=True,
            tooltip="The least time that it trains between two pauses; more gives it a larger share of the time.",
            advanced=True,
        ),
    ]


def make_settings(  # noqa: PLR0913
    *,
    output_name: str,
    steps: int,
    learning_rate: float,
    rank: int,
    batch_size: int,
    gradient_accumulation: int,
    seed: int,
    compile: str,
    save_every: int,
    resume: str,
    network: NetworkOptions | None = None,
    optimizer: OptimizerOptions | None = None,
    objective: ObjectiveOptions | None = None,
    memory: MemoryOptions | None = None,
    validation: ValidationOptions | None = None,
    save_every_epochs: int = TrainSettings.save_every_epochs,
    keep_last: int = TrainSettings.keep_last,
) -> TrainSettings:
    """Make the settings of a run from the inputs. A connected options node comes before the input that it replaces."""
    return TrainSettings(
        output_name=output_name,
        steps=steps,
        batch_size=batch_size,
        gradient_accumulation=gradient_accumulation,
        seed=seed,
        compile=compile,
        save_every=save_every,
        resume=resume,
        network=network or NetworkOptions(rank=rank, alpha=float(rank)),
        optimizer=optimizer or OptimizerOptions(learning_rate=learning_rate),
        objective=objective or ObjectiveOptions(),
        memory=memory or MemoryOptions(),
        save_every_epochs=save_every_epochs,
        keep_last=keep_last,
        validation=validation,
    )

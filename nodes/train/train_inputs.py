"""The inputs of Train LoRA."""

from comfy_api.latest import io

from ...common.text import joined
from ...models.registry import titles
from ...train.checkpoint.resume import list_states
from ...train.distributed.device_list import THIS_ONE
from ...train.settings import TrainSettings
from ..common.types import (
    MemoryType,
    NetworkType,
    ObjectiveType,
    OptimizerType,
    PreviewType,
    TrainingDataType,
    ValidationType,
)
from .run import runs_folder


def train_inputs() -> list[io.Input]:
    """All inputs, in the order in which saved workflows have them."""
    return [
        io.Model.Input(
            "model",
            tooltip=f"The model to train on, from any loader: {joined(titles())}, a fine-tune of one, or any "
            "other model of pictures or video. LoRAs on it stay in force; a Compile Model node in front gives "
            "its settings.",
        ),
        TrainingDataType.Input("data", tooltip="From Prepare Dataset or Latents to Training Data."),
        io.String.Input(
            "output_name",
            default="my_lora",
            tooltip="Name of the LoRA file. A subfolder may stand before it: styles/my_lora.",
        ),
        io.Int.Input(
            "steps",
            default=1000,
            min=1,
            max=1_000_000,
            tooltip="Optimizer steps. 1000 to 2000 suit 10 to 30 pictures; raise it and resume to go on.",
        ),
        io.Float.Input(
            "learning_rate",
            default=1e-4,
            min=1e-7,
            max=10.0,
            step=1e-6,
            round=False,
            tooltip="Size of each step. Lower it if pictures get oversharp or the loss jumps. A connected "
            "Optimizer's own learning_rate is used instead.",
        ),
        io.Int.Input(
            "rank",
            default=16,
            min=1,
            max=1024,
            tooltip="Capacity of the LoRA: 8 to 32 for a person or a style, more for much detail; the file "
            "grows with it. Alpha equals rank. A connected LoRA Network's own rank is used instead.",
        ),
        io.Int.Input(
            "batch_size",
            default=1,
            min=1,
            max=256,
            tooltip="Pictures per forward pass; they may differ in aspect ratio. More needs more memory.",
        ),
        io.Int.Input(
            "gradient_accumulation",
            default=1,
            min=1,
            max=1024,
            tooltip="Batches per optimizer step: the effect of a larger batch without its memory, at the same "
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
            tooltip="auto compiles each kind of block once, in the first step, and trains faster from then on, "
            "with the settings of a Compile Model node in front if there is one; where no compiler "
            "works it says so and trains eager. off is for short trials.",
        ),
        io.Int.Input(
            "save_every",
            default=250,
            min=0,
            max=1_000_000,
            tooltip="Steps between saves of the LoRA and of the whole state. 0 saves at the end, at Cancel and "
            "at an error only; a crash then loses the run.",
        ),
        io.Combo.Input(
            "resume",
            options=["latest", "off", *list_states(runs_folder())],
            default="latest",
            tooltip="latest goes on from the newest saved state of the same run, if there is one. off starts "
            "at step 0, beside what is there. A state goes on from that one. A run that is finished already is "
            "returned in any case; change the seed or output_name to train it again.",
            advanced=True,
        ),
        NetworkType.Input("network", optional=True, tooltip="From LoRA Network: rank, alpha, targets, dropout."),
        OptimizerType.Input("optimizer", optional=True, tooltip="From Optimizer; unconnected it is AdamW."),
        ObjectiveType.Input(
            "objective", optional=True, tooltip="From Training Objective: which noise levels are trained."
        ),
        MemoryType.Input(
            "memory",
            optional=True,
            tooltip="From Training Memory; unconnected, checkpointing is auto: the fastest that fits.",
        ),
        io.Model.Input(
            "model_low_noise",
            optional=True,
            tooltip="Wan 2.2's low noise expert, with the high noise one at model: both are trained, one after "
            "the other, each for all steps, on its side of the noise levels. Leave it empty for every other "
            "model.",
        ),
        PreviewType.Input(
            "preview",
            optional=True,
            tooltip="From Training Preview: prompts that are sampled while it trains, shown on this node. They "
            "change nothing of what is trained.",
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
            tooltip="Saves each time that this many epochs were shown, in place of save_every, which has to be "
            "0 then. An epoch is as many showings as there are pictures, repeats counted (of a folder with "
            "sample_ratio that part of it), and as many again of "
            "regularisation pictures where there are any; with mixed sizes and batch_size above 1 some "
            "pictures come a little sooner than others. 0 is off.",
            advanced=True,
        ),
        io.Int.Input(
            "keep_last",
            default=TrainSettings.keep_last,
            min=0,
            max=1_000_000,
            optional=True,
            tooltip="How many of the LoRAs that are saved on the way stay on disk, the newest; 0 keeps all. "
            "The finished and the best LoRA always stay. Average States needs all that it is to average.",
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
    ]

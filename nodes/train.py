"""The node that trains."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import folder_paths
import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker

from ..compile.branch import branch_of
from ..compile.settings import CompileSettings
from ..models.swapped_model import swap_settings_of
from ..train.data import TrainingData
from ..train.events import Observer
from ..train.experts import ExpertObserver, plan_experts
from ..train.lora_model import LoraModel
from ..train.options import MemoryOptions, NetworkOptions, ObjectiveOptions, OptimizerOptions
from ..train.run import TrainSettings, list_states
from ..train.train_lora import TrainResult, train_lora
from .data import TrainingDataType
from .events import ServerObserver
from .memory import MemoryType
from .objective import ObjectiveType
from .optimizer import OptimizerType
from .options import NetworkType
from .output import LoraModelType, LossMapType


def runs_folder() -> Path:
    """Where runs are kept: ComfyUI lists this folder in its LoRA loaders."""
    return Path(folder_paths.get_output_directory(), "loras")


class TesseraTrainLora(io.ComfyNode):
    """Trains a LoRA on the MODEL that comes in, which is left as it was."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraTrainLora",
            display_name="Train LoRA",
            category="Tessera/training",
            description="Trains a LoRA on a FLUX, Wan or Qwen-Image model. Everything a run makes lies in "
            "output/loras/<name>-<key>; a run that was finished before with the same settings is returned at once.",
            search_aliases=["lora training", "fine-tune", "trainer"],
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="The FLUX, Wan or Qwen-Image model to train on, from any loader. LoRAs on it stay in "
                    "force; a Compile Model node in front gives its backend and mode.",
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
                    tooltip="Fixes the LoRA's start, the order of the pictures, the noise and the noise levels.",
                ),
                io.Combo.Input(
                    "compile",
                    options=["auto", "off"],
                    default="auto",
                    tooltip="auto compiles each kind of block once, in the first step, and trains faster from then on, "
                    "with the backend and mode of a Compile Model node in front if there is one; where no compiler "
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
                NetworkType.Input(
                    "network", optional=True, tooltip="From LoRA Network: rank, alpha, targets, dropout."
                ),
                OptimizerType.Input("optimizer", optional=True, tooltip="From Optimizer; unconnected it is AdamW."),
                ObjectiveType.Input(
                    "objective", optional=True, tooltip="From Training Objective: which noise levels are trained."
                ),
                MemoryType.Input(
                    "memory", optional=True, tooltip="From Training Memory; unconnected it is full checkpointing."
                ),
                io.Model.Input(
                    "model_low_noise",
                    optional=True,
                    tooltip="Wan 2.2's low noise expert, with the high noise one at model: both are trained, one after "
                    "the other, each for all steps, on its side of the noise levels. Leave it empty for every other "
                    "model.",
                ),
            ],
            outputs=[
                LoraModelType.Output(
                    display_name="lora", tooltip="The trained LoRA, for Save LoRA or Load LoRA Model."
                ),
                LossMapType.Output(display_name="loss", tooltip="The loss of every step, for Loss Plot."),
                io.String.Output(display_name="path", tooltip="Where the LoRA file lies."),
                LoraModelType.Output(
                    display_name="lora_low_noise",
                    tooltip="The low noise expert's LoRA, with model_low_noise connected.",
                ),
                LossMapType.Output(
                    display_name="loss_low_noise",
                    tooltip="The low noise expert's loss, with model_low_noise connected.",
                ),
                io.String.Output(display_name="path_low_noise", tooltip="Where the low noise expert's file lies."),
            ],
        )

    @classmethod
    def validate_inputs(cls, resume: str | None) -> bool | str:  # None where it is linked
        if resume not in (None, "latest", "off") and resume not in list_states(runs_folder()):
            return f"resume: there is no state {resume!r} any more; choose another, 'latest' or 'off'."
        return True

    @classmethod
    def execute(
        cls,
        model: ModelPatcher,
        data: TrainingData,
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
        model_low_noise: ModelPatcher | None = None,
    ) -> io.NodeOutput:
        settings = TrainSettings(
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
        )
        data = replace(data, notes=(*data.notes, *overridden(settings, rank, learning_rate)))
        with torch.inference_mode(False):
            if model_low_noise is None:
                result = run(model, data, settings, ServerObserver(cls.hidden.unique_id, steps))
                nothing = ExecutionBlocker(
                    "This output of Train LoRA is the low noise expert's; connect model_low_noise, or use the output "
                    "without that name."
                )
                return io.NodeOutput(*outputs(result), nothing, nothing, nothing, ui={"tessera": [shown(result)]})
            observer = ServerObserver(cls.hidden.unique_id, 2 * steps)
            experts = plan_experts(model, model_low_noise, data, settings)
            high, low = (
                run(expert.model, data, expert.settings, ExpertObserver(observer, expert, number, len(experts)))
                for number, expert in enumerate(experts)
            )
        return io.NodeOutput(*outputs(high), *outputs(low), ui={"tessera": [shown(high), shown(low)]})


def run(model: ModelPatcher, data: TrainingData, settings: TrainSettings, observer: Observer) -> TrainResult:
    """Trains one LoRA on one MODEL, with what is set on it."""
    memory, memory_notes = memory_of(model, settings.memory)
    compile_settings, compile_notes = for_training(model, settings.compile)
    data = replace(data, notes=(*data.notes, *compile_notes, *memory_notes))
    return train_lora(model, data, replace(settings, memory=memory), runs_folder(), observer, compile_settings)


def outputs(result: TrainResult) -> tuple[LoraModel, dict[str, list[float]], str]:
    """LORA_MODEL, LOSS_MAP and the path."""
    return result.lora, {"loss": result.loss}, str(result.path)


def shown(result: TrainResult) -> dict[str, Any]:
    """The summary for `/history` and the node."""
    return {**result.summary, "path": result.path.relative_to(runs_folder().parent).as_posix()}


def overridden(settings: TrainSettings, rank: int, learning_rate: float) -> list[str]:
    """Which inputs of this node a connected options node has replaced, a sentence each."""
    notes = []
    if settings.network.rank != rank:
        notes.append(f"rank is {settings.network.rank}, from the connected LoRA Network, not {rank}.")
    if settings.optimizer.learning_rate != learning_rate:
        notes.append(
            f"learning_rate is {settings.optimizer.learning_rate:g}, from the connected Optimizer, "
            f"not {learning_rate:g}."
        )
    return notes


def memory_of(model: ModelPatcher, options: MemoryOptions) -> tuple[MemoryOptions, list[str]]:
    """The memory options with the MODEL's block swap in them, and a sentence on where that comes from. A connected
    Training Memory that swaps blocks itself wins."""
    swap = swap_settings_of(model)
    if swap is None or swap.blocks_to_swap == 0:
        return options, []
    if options.blocks_to_swap != 0:
        return options, [
            f"blocks_to_swap is {options.blocks_to_swap}, from the connected Training Memory, not "
            f"{swap.blocks_to_swap} of the MODEL."
        ]
    taken = replace(
        options,
        blocks_to_swap=swap.blocks_to_swap,
        prefetch_blocks=swap.prefetch_blocks,
        pin_memory=swap.pin_memory,
    )
    return taken, [f"blocks_to_swap is {swap.blocks_to_swap}, as set on the MODEL."]


def for_training(model: ModelPatcher, compile: str) -> tuple[CompileSettings | None, list[str]]:
    """What training takes of a Compile Model node in front, None without one, and a sentence on what it leaves out."""
    branch = branch_of(model)
    if branch is None:
        return None, []
    if compile == "off":
        return None, ["compile is off, so the Compile Model node in front has no effect on training."]
    asked = branch.settings
    notes = []
    left_out = {
        f"dynamic {asked.dynamic}": asked.dynamic == "true",
        f"cache_size_limit {asked.cache_size_limit}": asked.cache_size_limit != CompileSettings.cache_size_limit,
        f"scope {asked.scope}": asked.scope != "blocks",
        "overrides": bool(asked.overrides),
    }
    if unused := [name for name, there in left_out.items() if there]:
        notes.append(
            f"Of the Compile Model node {', '.join(unused)} {'is' if len(unused) == 1 else 'are'} left out: training "
            "compiles block by block, in whole graphs of planned sizes."
        )
    # Blocks of one kind share one callable, and a CUDA graph is bound to the addresses of one block's weights.
    how = asked.how().without_cuda_graphs()
    if how != asked.how():
        notes.append(f"Training takes no CUDA graphs, so it compiles with backend {how.backend} and mode {how.mode}.")
    return CompileSettings(how.backend, how.mode), notes


NODES = [TesseraTrainLora]

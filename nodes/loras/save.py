"""Save LoRA and Loss Plot."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import folder_paths
import torch
from comfy_api.latest import io, ui

from ...common.file_names import ENDING, plain_name
from ...common.text import quoted
from ...common.untrusted.tensor_files import metadata_field
from ...lora.files.formats import DTYPES, FORMATS, lora_file
from ...lora.files.readers import reader_notes
from ...train.preview.loss_plot import plot_loss
from ..common.dates import fill_in_dates
from ..common.images import image_tensor
from ..common.saved_workflow import workflow_files, workflow_texts
from ..common.types import LoraModelType, LossMapType

MOST_LETTERS = (
    3_500_000  # of workflow and prompt; the frontend reads only 4 MB of a file, which include the tensor names
)


# Not compared, as they change with what is in view and with every random seed.
_WORKFLOW_KEYS = ("workflow", "prompt")


class TesseraSaveLora(io.ComfyNode):
    """Writes a LoRA into ComfyUI's output folder, with the key names that the target program reads."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraSaveLora",
            display_name="Save LoRA",
            category="Tessera/output",
            description="Saves a LoRA as a safetensors file, unless the same one is saved there already. Files under "
            "loras/ appear in ComfyUI's LoRA loaders.",
            search_aliases=["export lora", "convert lora"],
            is_output_node=True,
            inputs=[
                LoraModelType.Input("lora", tooltip="The trained LoRA, from Train LoRA or any node that gives one."),
                io.String.Input(
                    "filename_prefix",
                    default="",
                    tooltip="Folder and beginning of the file name, inside ComfyUI's output folder; empty takes "
                    "loras/ and the run's name. A number is added, so nothing is overwritten, and %date:yyyy-MM-dd% "
                    "becomes the date. Files under loras/ appear in ComfyUI's LoRA loaders.",
                ),
                io.Combo.Input(
                    "format",
                    options=list(FORMATS),
                    default="kohya",
                    tooltip="The naming of the keys in the file. kohya: read by ComfyUI and nearly every other "
                    "program. comfyui: the model's own names. diffusers: its Python pipelines, plain LoRA only. Not "
                    "every program reads every format of every model; after saving, the node says which ones do.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=list(DTYPES),
                    default="bf16",
                    tooltip="Number format of the file. bf16 is fine for nearly everything, at half the size of "
                    "fp32; fp16 is finer but overflows above 65504; fp32 saves the exact trained values, for merging.",
                ),
                io.Boolean.Input(
                    "save_workflow",
                    default=False,
                    optional=True,
                    tooltip="Puts the workflow into the file, so that dropping the LoRA into ComfyUI opens it. Switch "
                    "it on to find out later how a LoRA was made; whoever gets the file can read it too.",
                ),
            ],
            outputs=[io.String.Output(display_name="path", tooltip="Where the file was saved.")],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
        )

    @classmethod
    def execute(
        cls,
        lora: Mapping[str, torch.Tensor],
        filename_prefix: str,
        format: str,
        dtype: str,
        save_workflow: bool = False,
    ) -> io.NodeOutput:
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            checked_prefix(filename_prefix) if filename_prefix.strip() else prefix_of_run(lora),
            folder_paths.get_output_directory(),
        )
        facts, note = dict(getattr(lora, "metadata", {})), ""
        if save_workflow:
            texts = workflow_texts(workflow_files(cls.hidden.prompt, cls.hidden.extra_pnginfo))
            note = without_workflow(texts)
            facts |= {} if note else texts
        contents = lora_file(lora, format, dtype, facts)
        earlier = [Path(folder) / f"{name}_{number:05}{ENDING}" for number in reversed(range(1, counter))]
        earlier_file = next((path for path in earlier if contents.equals(path, _WORKFLOW_KEYS)), None)
        file = earlier_file or Path(folder) / f"{name}_{counter:05}{ENDING}"
        if earlier_file is None:
            contents.write(file)
        saved = {"filename": file.name, "subfolder": subfolder, "type": "output", "format": format, "dtype": dtype}
        saved["is_new"] = earlier_file is None
        notes = [*reader_notes(lora, format), *filter(None, [note])]
        return io.NodeOutput(str(file), ui={"tessera": [{**saved, "notes": notes}]})


class TesseraLossPlot(io.ComfyNode):
    """Draws the loss of a training run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraLossPlot",
            display_name="Loss Plot",
            category="Tessera/output",
            description="Plots the loss of each training step, its moving average, and the validation loss.",
            search_aliases=["plot loss", "training chart"],
            is_output_node=True,
            inputs=[
                LossMapType.Input("loss", tooltip="The losses of a run, from Train LoRA or core's training node."),
                io.Float.Input(
                    "smoothing",
                    default=0.9,
                    min=0.0,
                    max=0.999,
                    step=0.001,
                    tooltip="How smooth the moving average is: 0 shows the plain loss, 0.9 averages about 10 steps, "
                    "0.99 about 100. Raise it for long or noisy runs.",
                ),
                io.Boolean.Input(
                    "log_scale",
                    default=False,
                    tooltip="Uses a logarithmic scale. Switch it on to see small changes after a high start.",
                ),
            ],
            outputs=[io.Image.Output(display_name="plot", tooltip="The plot, 1024 x 512 pixels.")],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
        )

    @classmethod
    def execute(cls, loss: Mapping[str, Any], smoothing: float, log_scale: bool) -> io.NodeOutput:
        series = loss.get("loss") if isinstance(loss, Mapping) else None
        if series is None:
            raise ValueError("loss has no series called 'loss'; connect the LOSS_MAP of a training node.")
        points = [(int(point["step"]), float(point["loss"])) for point in loss.get("validation", ())]
        picture = plot_loss([float(value) for value in series], smoothing, log_scale, validation=points)
        image = image_tensor(picture)
        return io.NodeOutput(image, ui=ui.PreviewImage(image, cls=cls))


def without_workflow(texts: Mapping[str, str]) -> str:
    """Return why a file can't contain the workflow; empty if it can."""
    if not texts:
        return "save_workflow: ComfyUI runs with --disable-metadata, so the workflow is not in the file."
    if sum(len(json.dumps(text)) for text in texts.values()) > MOST_LETTERS:
        return "save_workflow: the workflow is too large, so it is not in the file (ComfyUI reads only its first 4 MB)."
    return ""


def prefix_of_run(lora: Mapping[str, torch.Tensor]) -> str:
    """Return the prefix `loras/<output name>` for the LoRA of a run, and one for all LoRAs that name none."""
    metadata = getattr(lora, "metadata", {})
    with suppress(KeyError, TypeError, ValueError):
        return f"loras/{plain_name(metadata_field(metadata, 'tessera')['output_name'])}"
    with suppress(KeyError, TypeError, ValueError):
        return f"loras/{plain_name(metadata['ss_output_name'])}"
    return "loras/lora"


def checked_prefix(prefix: str) -> str:
    """Fill in dates and check that the prefix stays inside the output folder. Raises ValueError if not."""
    prefix = fill_in_dates(prefix.strip(), datetime.now())
    if prefix.lower().endswith(ENDING):
        prefix = prefix[: -len(ENDING)]
    parts = re.split(r"[/\\]", prefix)
    if parts[0] in ("", "~") or ":" in prefix or ".." in parts or "\0" in prefix:
        raise ValueError(
            f"filename_prefix is {quoted(prefix)}; give a name inside ComfyUI's output folder, such as loras/tessera."
        )
    if parts[-1].strip(" .") == "":
        raise ValueError(
            f"filename_prefix is {quoted(prefix)}, which is a folder; add a file name, such as loras/tessera."
        )
    return "/".join(parts)


NODES = [TesseraSaveLora, TesseraLossPlot]

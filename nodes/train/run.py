"""One run of Train LoRA: what is set on its MODEL goes in, and what the node gives and shows comes out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import folder_paths
from comfy.model_patcher import ModelPatcher
from comfy_execution.graph_utils import ExecutionBlocker
from PIL import Image
from torch import Tensor

from ...data.samples import TrainingData
from ...lora.base import with_base
from ...lora.files.lora_model import LoraModel
from ...train.experts import Expert
from ...train.observer import Observer
from ...train.preview.previewer import Partner, Preview, Previewer, preview_notes
from ...train.settings import TrainSettings
from ...train.train_lora import TrainResult, train_lora
from ..common.images import image_tensor
from .inherited_settings import for_training, memory_of


def runs_folder() -> Path:
    """Where runs are kept: ComfyUI lists this folder in its LoRA loaders."""
    return Path(folder_paths.get_output_directory(), "loras")


def run(
    model: ModelPatcher,
    data: TrainingData,
    settings: TrainSettings,
    observer: Observer,
    files: Mapping[str, str],
    previews: Sequence[Preview] = (),
    partner: Partner | None = None,
) -> TrainResult:
    """Trains one LoRA on one MODEL, with what is set on it. files: the graph, as `workflow_files` gives it. partner:
    the other one of a pair of experts."""
    watchers = [Previewer(previews, with_base(model, settings.network), partner)] if previews else []
    memory, memory_notes = memory_of(model, settings.memory)
    compile_settings, compile_notes = for_training(model, settings.compile)
    data = replace(data, notes=(*data.notes, *compile_notes, *memory_notes, *preview_notes(previews, model)))
    settings = replace(settings, memory=memory)
    return train_lora(model, data, settings, runs_folder(), observer, compile_settings, watchers, files)


def settings_of_run(expert: Expert) -> TrainSettings:
    """An expert's settings as `run` has them."""
    memory, _ = memory_of(expert.model, expert.settings.memory)
    return replace(expert.settings, memory=memory)


def outputs(result: TrainResult) -> tuple[LoraModel, dict[str, list[Any]], str]:
    """LORA_MODEL, LOSS_MAP (with the points of validation, where there are any) and the path."""
    loss: dict[str, list[Any]] = {"loss": result.loss}
    if result.validation:
        loss["validation"] = result.validation
    return result.lora, loss, str(result.path)


def sheet_of(result: TrainResult) -> Tensor | ExecutionBlocker:
    """The sheet of its previews as an IMAGE."""
    sheet = result.sheet
    if sheet is None:
        return ExecutionBlocker("This run has no previews; connect a Training Preview to preview of Train LoRA.")
    with Image.open(sheet) as picture:
        return image_tensor(picture)


def ui_of(*results: TrainResult) -> dict[str, Any]:
    """What the node shows, and `/history` holds."""
    sheets = [result.sheet.relative_to(runs_folder().parent) for result in results if result.sheet is not None]
    images = [{"filename": s.name, "subfolder": s.parent.as_posix(), "type": "output"} for s in sheets]
    return {"tessera": [shown(result) for result in results]} | ({"images": images} if images else {})


def shown(result: TrainResult) -> dict[str, Any]:
    """The summary for `/history` and the node."""
    return {**result.summary, "path": result.path.relative_to(runs_folder().parent).as_posix()}

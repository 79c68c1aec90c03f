"""A run of Train LoRA, from node inputs to node outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import folder_paths
from comfy.model_patcher import ModelPatcher
from comfy_execution.graph_utils import ExecutionBlocker
from comfy_execution.utils import get_executing_context
from PIL import Image
from torch import Tensor

from ...data.samples import TrainingData
from ...lora.base import with_base
from ...lora.files.lora_model import LoraModel
from ...train.checkpoint.state import state_path
from ...train.config.settings import TrainSettings
from ...train.config.threads import threads_for
from ...train.distributed.launcher import Job
from ...train.distributed.world import current_world
from ...train.experts import Expert
from ...train.preflight.run_start import RunStart
from ...train.report.observer import Observer
from ...train.run_report.files import has_report, write_lora_picture, write_report
from ...train.runs.run_folder import RunFolder
from ...train.train_lora import RunRequest, TrainResult, train_lora
from ...train.watch.other_model import on_other_models
from ...train.watch.previewer import Partner, Preview, Previewer
from ..common.images import image_tensor
from ..common.saved_workflow import workflow_texts
from .inherited_settings import inherited_compile, inherited_memory


def runs_folder() -> Path:
    """Return the folder of runs; ComfyUI lists it in its LoRA loaders."""
    return Path(folder_paths.get_output_directory(), "loras")


def run(
    model: ModelPatcher,
    data: TrainingData,
    settings: TrainSettings,
    observer: Observer,
    files: Mapping[str, str],
    previews: Sequence[Preview] = (),
    partner: Partner | None = None,
    elsewhere: Callable[[RunStart], TrainResult | None] | None = None,
) -> TrainResult:
    """Train one LoRA on one MODEL, with the settings attached to it.

    files: the graph, as returned by `workflow_files`.
    partner: the other expert of a pair.
    elsewhere: see `RunRequest`.
    """
    request = run_request(model, data, settings, observer, files, previews, partner, elsewhere)
    with threads_for(model):
        result = train_lora(request, current_world())
    if Job.current() is None and result.saved and not result.paused:
        _save_report(result, files, observer)
    return result


def _save_report(result: TrainResult, files: Mapping[str, str], observer: Observer) -> None:
    """Write the report and the LoRA's picture, unless they are there. A failed write is a note: the LoRA is saved."""
    folder = RunFolder(result.path.parent, result.path.stem)
    try:
        if not has_report(folder):
            write_lora_picture(folder)
            write_report(folder, workflow_texts(files))
    except OSError as error:
        observer.note(f"The report of this run could not be written: {error.strerror}.")


def run_request(
    model: ModelPatcher,
    data: TrainingData,
    settings: TrainSettings,
    observer: Observer,
    files: Mapping[str, str],
    previews: Sequence[Preview] = (),
    partner: Partner | None = None,
    elsewhere: Callable[[RunStart], TrainResult | None] | None = None,
) -> RunRequest:
    """Make the request of a run, with the settings attached to its MODEL. The arguments are those of `run`."""
    previews = on_other_models(previews, model, settings.network)
    based = with_base(model, settings.network)
    watchers = [Previewer(previews, based, partner, workflow_texts(files))] if previews else []
    memory, memory_notes = inherited_memory(model, settings.memory)
    compile_settings, compile_notes = inherited_compile(model, settings.compile)
    data = replace(data, notes=(*data.notes, *compile_notes, *memory_notes))
    settings = replace(settings, memory=memory)
    job = Job.current()
    spare = Path(folder_paths.get_temp_directory() if job is None else job.facts.spare)
    queued = prompt_facts() if job is None else job.facts.queued
    return RunRequest(
        model=model,
        data=data,
        settings=settings,
        root=runs_folder(),
        observer=observer,
        compile_settings=compile_settings,
        watchers=watchers,
        companion_files=files,
        spare_folder=spare,
        queued=queued,
        elsewhere=elsewhere,
    )


def prompt_facts() -> dict[str, str]:
    """Return run.json's facts on the prompt executed now; empty without one."""
    context = get_executing_context()
    return {} if context is None else {"prompt_id": context.prompt_id, "node": context.node_id}


def settings_of_run(expert: Expert) -> TrainSettings:
    """Return the settings of an expert after inheritance, as used by `run`."""
    memory, _ = inherited_memory(expert.model, expert.settings.memory)
    return replace(expert.settings, memory=memory)


def outputs(result: TrainResult) -> tuple[LoraModel, dict[str, Any], str]:
    """Return LORA_MODEL, LOSS_MAP (with validation points and losses by picture, if any) and the path.

    The path is empty without a file.
    """
    loss: dict[str, Any] = {"loss": result.loss}
    if result.validation:
        loss["validation"] = result.validation
    if result.pictures is not None:
        loss["pictures"] = {"report": result.pictures, "sheet": result.picture_sheet}
    path = result.path if result.saved else result.copy
    return result.lora, loss, "" if path is None else str(path)


def preview_sheet(result: TrainResult) -> Tensor | ExecutionBlocker:
    """Load the preview sheet as an IMAGE."""
    sheet = result.sheet
    if sheet is None:
        return ExecutionBlocker(
            "This run has no previews; to get some, connect Training Preview to preview of Train LoRA."
        )
    with Image.open(sheet, formats=["PNG"]) as sheet_image:
        return image_tensor(sheet_image)


def node_ui(*results: TrainResult) -> dict[str, Any]:
    """Build the `ui` payload that the node shows and `/history` keeps."""
    sheets = [result.sheet.relative_to(runs_folder().parent) for result in results if result.sheet is not None]
    images = [{"filename": s.name, "subfolder": s.parent.as_posix(), "type": "output"} for s in sheets]
    return {"tessera": [summary_payload(result) for result in results]} | ({"images": images} if images else {})


def state_name(result: TrainResult) -> str:
    """Return the state of a run's last step, as `resume` names it; empty if it could not be saved."""
    state = state_path(result.path.parent, result.summary["steps_done"])
    return state.relative_to(runs_folder()).as_posix() if state.is_file() else ""


def summary_payload(result: TrainResult) -> dict[str, Any]:
    """Return the summary with the path relative to the output folder; empty if the LoRA could not be saved there."""
    return {**result.summary, "path": result.path.relative_to(runs_folder().parent).as_posix() if result.saved else ""}

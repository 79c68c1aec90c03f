"""Tune Compile: search for the fastest Compile Model settings."""

import logging
from pathlib import Path
from typing import Any

import folder_paths
from comfy.model_patcher import ModelPatcher
from comfy.utils import ProgressBar
from comfy_api.latest import io, ui

from ...common.files import write_atomically
from ...compile.tune.chart import plot_tuning
from ...compile.tune.inputs import StepInputs, StepSize, step_inputs
from ...compile.tune.results import TuneResult, file_name, read_result, result_key, to_json
from ...compile.tune.search import candidates, tune, tuned_model
from ..common.images import image_tensor
from ..common.progress import show_progress_text
from .compile import check_is_diffusion_model

log = logging.getLogger(__name__)


def tune_folder() -> Path:
    """Return the folder of stored results."""
    return Path(folder_paths.get_user_directory(), "tessera", "tune")


class TesseraTuneCompile(io.ComfyNode):
    """The MODEL, compiled with the settings that are fastest on this machine."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraTuneCompile",
            display_name="Tune Compile",
            category="Tessera/compile",
            description="Measures which Compile Model settings sample fastest with this model, size and GPU, and "
            "compiles the MODEL with them. The result is remembered, so it measures only once. Use it instead of "
            "Compile Model.",
            search_aliases=["torch.compile", "autotune", "benchmark compile", "fastest settings", "speed up"],
            is_output_node=True,
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            inputs=[
                io.Model.Input("model", tooltip="The diffusion model, from any loader. It isn't changed."),
                io.Int.Input(
                    "width",
                    default=1024,
                    min=16,
                    max=16384,
                    step=8,
                    tooltip="Pixels. Set what you mostly sample; other sizes work with the result too, but their "
                    "gain may differ.",
                ),
                io.Int.Input(
                    "height",
                    default=1024,
                    min=16,
                    max=16384,
                    step=8,
                    tooltip="Pixels, as for width: what you mostly sample.",
                ),
                io.Int.Input(
                    "time_budget",
                    default=300,
                    min=1,
                    max=86400,
                    optional=True,
                    tooltip="Seconds that measuring may take. Settings that don't fit in are skipped and listed; "
                    "raise it then. A compile that takes longer than expected is still finished.",
                ),
                io.Int.Input(
                    "frames",
                    default=1,
                    min=1,
                    max=16384,
                    optional=True,
                    advanced=True,
                    tooltip="Frames of the video, such as 81 for Wan; 1 for pictures.",
                ),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=4096,
                    optional=True,
                    advanced=True,
                    tooltip="Pictures sampled at a time. Set what your empty latent has.",
                ),
                io.Int.Input(
                    "text_length",
                    default=0,
                    min=0,
                    max=16384,
                    optional=True,
                    advanced=True,
                    tooltip="Tokens of the prompt; 0 takes what is usual for the model, such as 256 for FLUX.1 and 512 "
                    "for Wan. Not used where positive is connected.",
                ),
                io.Float.Input(
                    "cfg",
                    default=0.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    optional=True,
                    advanced=True,
                    tooltip="As on your sampler: at 1 the negative prompt is not run. 0 takes what is usual for the "
                    "model: 1 for FLUX, more for others.",
                ),
                io.Boolean.Input(
                    "remeasure",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip="On: measures again even if a result is remembered. Switch it on once after a driver "
                    "update or when the machine was busy, then off.",
                ),
                io.Conditioning.Input(
                    "positive",
                    optional=True,
                    tooltip="A prompt to measure with instead of random text. Connect one for models that need more "
                    "than text, such as reference pictures, or if this node asks for one.",
                ),
            ],
            outputs=[
                io.Model.Output(tooltip="Compiled with the fastest settings, or uncompiled if nothing is faster."),
                io.Image.Output(display_name="chart", tooltip="What was measured, 1024 x 512 pixels."),
                io.String.Output(display_name="report", tooltip="The same as a table."),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: ModelPatcher,
        width: int,
        height: int,
        time_budget: int = 300,
        frames: int = 1,
        batch_size: int = 1,
        text_length: int = 0,
        cfg: float = 0.0,
        remeasure: bool = False,
        positive: list[list[Any]] | None = None,
    ) -> io.NodeOutput:
        check_is_diffusion_model(model)
        inputs = step_inputs(model, StepSize(width, height, batch_size, frames, text_length, cfg), positive)
        node_id = getattr(cls.hidden, "unique_id", None)  # None if no server runs the node
        result, notes = read_earlier_result(model, inputs, time_budget, remeasure)
        if result is None:
            result = _tune(model, inputs, time_budget, node_id)
            notes += store_result(result)
        for note in notes:
            log.info(note)
        chart = image_tensor(plot_tuning(result))
        text = "\n".join([result.text(), *notes])
        payload = result.facts() | {"text": text, "notes": notes}
        images = ui.PreviewImage(chart, cls=cls).as_dict()["images"]
        return io.NodeOutput(tuned_model(model, result), chart, text, ui={"images": images, "tessera": [payload]})


def _tune(model: ModelPatcher, inputs: StepInputs, time_budget: int, node_id: str | None) -> TuneResult:
    trial_settings = candidates(model.load_device)
    bar = ProgressBar(len(trial_settings) + 1, node_id=node_id)

    def tell(completed: int, text: str) -> None:
        log.info("Tune Compile: %s", text)
        bar.update_absolute(completed)
        show_progress_text(node_id, text)

    return tune(model, inputs, time_budget, trial_settings, tell)


def read_earlier_result(
    model: ModelPatcher, inputs: StepInputs, time_budget: float, remeasure: bool
) -> tuple[TuneResult | None, list[str]]:
    """Read an earlier result; None if everything must be measured. Also returns notes for the user."""
    if remeasure:
        return None, []
    key = result_key(model, inputs)
    try:
        stored = read_result(tune_folder() / file_name(key), key)
    except ValueError as error:
        return None, [str(error)]
    if stored is None:
        return None, []
    if not stored.complete(time_budget):
        return None, [
            f"Measured again, since time_budget is above the {stored.time_budget:g} s of {stored.measured_at}."
        ]
    return stored, [
        f"Remembered from {stored.measured_at}: nothing was measured. Switch remeasure on to measure again."
    ]


def store_result(result: TuneResult) -> list[str]:
    """Store a result for the next run. Returns a note if it can't be written."""
    if not result.measured:
        return []

    def write(file: Path) -> None:
        file.write_text(to_json(result), encoding="utf-8")

    try:
        write_atomically(tune_folder() / file_name(result.key), write)
    except OSError as error:
        return [f"The result is not remembered: {error}"]
    return []


NODES = [TesseraTuneCompile]

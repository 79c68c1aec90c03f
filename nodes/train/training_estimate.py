"""Training Estimate: what a run of Train LoRA would take."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

from ...data.samples import TrainingData
from ...train.config.threads import threads_for
from ...train.distributed.device_list import THIS_ONE
from ...train.estimate.estimate import Estimate, estimate
from ...train.estimate.report import CALCULATED, describe, fixes, rows, table
from ...train.experts import Expert, ExpertObserver, plan_experts
from ..common.progress import ServerObserver
from .inherited_settings import overridden_notes, shared_lora_notes
from .run import run_request, runs_folder, settings_of_run
from .train_inputs import make_settings, train_inputs
from .train_lora import TesseraTrainLora

# Inputs of Train LoRA that change nothing of the first steps.
_UNUSED = ("preview", "devices", "preset", "while_others_wait", "minutes_between_pauses")


class TesseraTrainingEstimate(io.ComfyNode):
    """Measures two steps of a run, and shows its time, memory and disk."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraTrainingEstimate",
            display_name="Training Estimate",
            category="Tessera/training",
            description="Shows before a training how long it would take, how much memory and disk it needs, and what "
            "other settings would change. It takes two steps on your model and data, and writes nothing but the "
            "caches. The inputs are those of Train LoRA.",
            search_aliases=["estimate", "how long", "vram", "out of memory", "train lora"],
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=train_inputs(),
            outputs=[io.String.Output(display_name="report", tooltip="What was measured and calculated, in words.")],
        )

    @classmethod
    def validate_inputs(cls, resume: str | None = None, devices: str | None = None) -> bool | str:  # None: linked
        return TesseraTrainLora.validate_inputs(resume, devices)

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        return time.monotonic()  # the free memory may be another

    @classmethod
    def execute(
        cls, model: ModelPatcher, data: TrainingData, model_low_noise: ModelPatcher | None = None, **inputs: Any
    ) -> io.NodeOutput:
        settings = make_settings(**{name: value for name, value in inputs.items() if name not in _UNUSED})
        notes = overridden_notes(settings, inputs["rank"], inputs["learning_rate"])
        if inputs.get("devices", THIS_ONE) != THIS_ONE:
            notes.append("devices: the steps were measured on one device; several share each batch.")
        data = replace(data, notes=(*data.notes, *notes))
        observer = ServerObserver(cls.hidden.unique_id, 1)
        with torch.inference_mode(False):
            if model_low_noise is None:
                return _output({"": _estimated(model, data, settings, observer)})
            experts = plan_experts(model, model_low_noise, data, settings, runs_folder(), settings_of_run)
            data = replace(data, notes=(*data.notes, *shared_lora_notes(settings)))
            return _output(
                {
                    expert.title: _estimated(expert.model, data, expert.settings, _watching(observer, experts, number))
                    for number, expert in enumerate(experts)
                }
            )


def _watching(observer: ServerObserver, experts: list[Expert], number: int) -> ExpertObserver:
    return ExpertObserver(observer, experts[number], number, len(experts))


def _estimated(model: ModelPatcher, data: TrainingData, settings: Any, observer: Any) -> Estimate:
    with threads_for(model):
        return estimate(run_request(model, data, settings, observer, {}))


def _output(estimates: Mapping[str, Estimate]) -> io.NodeOutput:
    """Return the report and what the node shows. estimates: by the title of the expert, empty for a single run."""
    payloads = []
    texts = []
    for title, result in estimates.items():
        lines = [f"{title}:"] * bool(title) + describe(result)
        calculated = table(result)
        payloads.append(
            {
                "estimate": result.plain(),
                "lines": [*lines, *([CALCULATED] if calculated else [])],
                "rows": rows(result),
                "fixes": [{"name": change.name, "value": change.after} for change in fixes(result)],
            }
        )
        texts.append("\n".join([*lines, *([calculated] if calculated else [])]))
    text = "\n\n".join(texts)
    return io.NodeOutput(text, ui={"tessera": payloads, "text": [text]})


NODES = [TesseraTrainingEstimate]

"""Train LoRA."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker

from ...common.text import joined, quoted
from ...data.samples import TrainingData
from ...lora.base import with_base
from ...lora.options import NetworkOptions
from ...models.catalogue.registry import family_of, titles
from ...train.checkpoint.resume import find_state
from ...train.config.settings import MemoryOptions, TrainSettings, ValidationOptions
from ...train.distributed.device_list import THIS_ONE
from ...train.distributed.launcher import Job
from ...train.experts import ExpertObserver, plan_experts
from ...train.objective.options import ObjectiveOptions
from ...train.optim.options import OptimizerOptions
from ...train.preflight.run_start import RunStart
from ...train.train_lora import PAUSED, TrainResult
from ...train.watch.other_model import check_one_model
from ...train.watch.previewer import Partner, Preview, check_previews
from ..common.progress import prompt_id
from ..common.saved_workflow import workflow_files
from ..common.types import LoraModelType, LossMapType
from ..queue.observer import PausingObserver
from ..queue.turns import FINISH_FIRST, MINUTES, Turn
from .devices import OnDevices, SameRun, chosen_devices, stopped_before
from .inherited_settings import overridden_notes, shared_lora_notes
from .presets import CUSTOM, preset_notes
from .run import (
    node_ui,
    outputs,
    preview_sheet,
    run,
    runs_folder,
    settings_of_run,
    state_name,
    summary_payload,
)
from .session_outputs import record_outputs, record_stopped, times_lost
from .train_inputs import make_settings, train_inputs


class TesseraTrainLora(io.ComfyNode):
    """Trains a LoRA on the incoming MODEL, which is left unchanged."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraTrainLora",
            display_name="Train LoRA (Tessera)",
            category="Tessera/training",
            description=f"Trains a LoRA on {joined(titles())}, and on every other model of pictures or video that "
            "ComfyUI samples. Everything a run makes goes to output/loras/<name> (001), (002) and so on. If the "
            "same run already finished, its LoRA is returned at once.",
            search_aliases=["lora training", "lora train", "train lora", "train flux", "fine-tune", "trainer"],
            is_output_node=True,
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            inputs=train_inputs(),
            outputs=[
                LoraModelType.Output(
                    display_name="lora", tooltip="The trained LoRA, for Save LoRA or Load LoRA Model."
                ),
                LossMapType.Output(
                    display_name="loss", tooltip="The loss of every step, for Loss Plot and Loss by Picture."
                ),
                io.String.Output(display_name="path", tooltip="Where the LoRA file was saved."),
                LoraModelType.Output(
                    display_name="lora_low_noise",
                    tooltip="The low noise expert's LoRA, with model_low_noise connected.",
                ),
                LossMapType.Output(
                    display_name="loss_low_noise",
                    tooltip="The low noise expert's loss, with model_low_noise connected.",
                ),
                io.String.Output(display_name="path_low_noise", tooltip="Where the low noise expert's file was saved."),
                io.Image.Output(display_name="previews", tooltip="The sheet of the previews, with preview connected."),
                io.Image.Output(
                    display_name="previews_low_noise",
                    tooltip="The sheet of the low noise expert's run, with preview and model_low_noise connected.",
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, resume: str | None = None, devices: str | None = None) -> bool | str:  # None: linked
        try:
            chosen_devices(THIS_ONE if devices is None else devices)
        except ValueError as error:
            return str(error)
        if resume not in (None, "latest", "off") and find_state(runs_folder(), resume) is None:
            return f"resume: there is no state {quoted(resume)} any more; choose another, 'latest' or 'off'."
        return True

    @classmethod
    def fingerprint_inputs(cls, output_name: str | None = None, **_: Any) -> int:
        return times_lost(output_name)

    @classmethod
    def execute(  # noqa: PLR0913
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
        preview: Sequence[Preview] = (),
        validation: ValidationOptions | None = None,
        save_every_epochs: int = TrainSettings.save_every_epochs,
        keep_last: int = TrainSettings.keep_last,
        devices: str = THIS_ONE,
        preset: str = CUSTOM,
        while_others_wait: str = FINISH_FIRST,
        minutes_between_pauses: float = MINUTES,
    ) -> io.NodeOutput:
        settings = make_settings(
            output_name=output_name,
            steps=steps,
            learning_rate=learning_rate,
            rank=rank,
            batch_size=batch_size,
            gradient_accumulation=gradient_accumulation,
            seed=seed,
            compile=compile,
            save_every=save_every,
            resume=resume,
            network=network,
            optimizer=optimizer,
            objective=objective,
            memory=memory,
            save_every_epochs=save_every_epochs,
            keep_last=keep_last,
            validation=validation,
        )
        filled: dict[str, float] = {"steps": steps, "gradient_accumulation": gradient_accumulation}
        filled |= {} if network else {"rank": rank}
        filled |= {} if optimizer else {"learning_rate": learning_rate}
        notes = [] if preset == CUSTOM else preset_notes(preset, family_of(model), filled)
        notes += overridden_notes(settings, rank, learning_rate)
        prompt = cls.hidden.prompt
        extra = cls.hidden.extra_pnginfo
        job = Job.current()
        turn = Turn(while_others_wait, minutes_between_pauses, prompt_id(), cls.hidden.unique_id)
        reason = finishes_first(turn, devices, resume, model_low_noise)
        if reason and turn.lets_pass:
            turn.finish_first()
            notes.append(reason)
        if turn.is_over or turn.gives_way():
            return cls._paused(turn, output_name)
        settings = replace(settings, resume=turn.resume(resume))
        data = replace(data, notes=(*data.notes, *notes, *turn.notes))
        files = workflow_files(prompt, extra) if job is None else job.facts.files
        observer = PausingObserver(
            cls.hidden.unique_id, steps if model_low_noise is None else 2 * steps, turn, not reason
        )
        elsewhere: Callable[[RunStart], TrainResult | None] | None = None
        if device_ids := chosen_devices(devices):
            elsewhere = OnDevices(device_ids, prompt, extra, settings, files, observer)
        elif job is not None:
            trains = observer.node_id == job.facts.queued.get("node")
            elsewhere = SameRun(job.facts.key) if trains else stopped_before
        with torch.inference_mode(False):
            if model_low_noise is None:
                result = run(model, data, settings, observer, files, preview, elsewhere=elsewhere)
                blocked = ExecutionBlocker(
                    "This output of Train LoRA is the low noise expert's; connect model_low_noise, or use the output "
                    "without that name."
                )
                record_outputs(output_name, [result.path] if result.saved else [])
                if result.paused:
                    return cls._paused(turn, output_name, result)
                if result.stopped:
                    record_stopped(output_name)
                else:
                    turn.record_finished()
                return io.NodeOutput(
                    *outputs(result), blocked, blocked, blocked, preview_sheet(result), blocked, ui=node_ui(result)
                )
            check_one_model(preview)
            experts = plan_experts(model, model_low_noise, data, settings, runs_folder(), settings_of_run)
            data = replace(data, notes=(*data.notes, *shared_lora_notes(settings)))
            for expert in experts:
                check_previews(preview, family_of(expert.model), expert.model)
            results: list[TrainResult] = []
            for number, expert in enumerate(experts):
                watching = ExpertObserver(observer, expert, number, len(experts))
                other = experts[1 - number]
                based_model = with_base(other.model, other.settings.network)
                first_lora = results[0].lora if results else None
                partner = Partner(based_model, other.side, first_lora, settings.objective.expert_boundary or None)
                results.append(run(expert.model, data, expert.settings, watching, files, preview, partner, elsewhere))
                if results[-1].paused:
                    return cls._paused(turn, output_name, *results)
        record_outputs(output_name, [result.path for result in results if result.saved])
        if any(result.stopped for result in results):
            record_stopped(output_name)
        else:
            turn.record_finished()
        high, low = results
        return io.NodeOutput(
            *outputs(high), *outputs(low), preview_sheet(high), preview_sheet(low), ui=node_ui(high, low)
        )

    @classmethod
    def _paused(cls, turn: Turn, output_name: str, *results: TrainResult) -> io.NodeOutput:
        """Make the prompt that goes on, and return outputs that stop all nodes behind this one in silence."""
        if not turn.is_over:
            turn.follow(state_name(results[-1]) if results else "")
        record_stopped(output_name)
        paused = {"status": PAUSED, "steps_done": 0, "output_name": output_name}
        summaries = [summary_payload(result) for result in results] or [paused]
        ui = {"tessera": [{**summary, "next_prompt_id": turn.next_prompt_id} for summary in summaries]}
        return io.NodeOutput(*[ExecutionBlocker(None)] * len(cls.define_schema().outputs), ui=ui)


def finishes_first(turn: Turn, devices: str, resume: str, model_low_noise: ModelPatcher | None) -> str:
    """Say why a run can't let other prompts pass; empty if it can."""
    if not turn.has_queue:
        return "while_others_wait has no effect here: this workflow runs without ComfyUI's queue."
    if chosen_devices(devices):
        return "while_others_wait has no effect on several devices: this run trains to its end before others."
    if model_low_noise is not None and resume != "latest":
        return "while_others_wait needs resume 'latest' with two experts: this run trains to its end before others."
    return ""


NODES = [TesseraTrainLora]

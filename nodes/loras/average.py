"""Average States: the EMA of a run, computed after training."""

from typing import Any

import torch
from comfy_api.latest import io

from ...common.text import quoted
from ...train.checkpoint.post_hoc_ema import PROFILES, WIDEST, Profile, average, list_runs, snapshots
from ..common.types import LoraModelType
from ..train.run import runs_folder


class TesseraAverageStates(io.ComfyNode):
    """Moving average of a run's LoRA, computed from the LoRAs saved during training."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraAverageStates",
            display_name="Average States",
            category="Tessera/output",
            description="Averages (EMA) the LoRAs that a training run saved on the way, after the training. Try "
            "several averages without training again.",
            search_aliases=["ema", "post-hoc ema", "average lora", "merge checkpoints", "moving average"],
            inputs=[
                io.Combo.Input(
                    "run",
                    options=list_runs(runs_folder()),
                    tooltip="The run, by its folder in output/loras. Runs with at least two saved LoRAs are listed "
                    "(press R to refresh). Train with a small save_every and keep_last at 0.",
                ),
                io.Combo.Input(
                    "profile",
                    options=list(PROFILES),
                    default=Profile.kind,
                    tooltip="How much each save counts. exponential: like ema_decay on Optimizer. power: later ones "
                    "count more, in the same shape for runs of any length. equal: all the same.",
                ),
                io.Float.Input(
                    "decay",
                    default=Profile.decay,
                    min=0.0001,
                    max=0.99999,
                    step=0.0001,
                    round=False,
                    tooltip="For exponential: how much of the average remains at each step. 0.999 averages about "
                    "1000 steps, 0.99 about 100. Raise it for a smoother LoRA.",
                ),
                io.Float.Input(
                    "width",
                    default=Profile.width,
                    min=0.01,
                    max=WIDEST,
                    step=0.01,
                    round=False,
                    tooltip="For power: how wide the average is, as a part of the run (its standard deviation). 0.05 "
                    "is narrow, 0.25 covers nearly all of the run.",
                ),
                io.Float.Input(
                    "last_part",
                    default=Profile.last_part,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    round=False,
                    tooltip="How much of the run is averaged, counted from the end. Lower it (such as 0.25 with "
                    "equal) to leave out early saves that had not learnt much.",
                ),
            ],
            outputs=[
                LoraModelType.Output(display_name="lora", tooltip="For Save LoRA or core's Load LoRA Model."),
                io.String.Output(display_name="report", tooltip="Which LoRAs were averaged, and how much each counts."),
            ],
        )

    @classmethod
    def validate_inputs(cls, run: str | None = None) -> bool | str:  # None if linked
        if run is not None and run not in list_runs(runs_folder()):
            return f"run: there is no run {quoted(run)} with two saved LoRAs or more; choose another (press R)."
        return True

    @classmethod
    def fingerprint_inputs(cls, run: str, **_: Any) -> Any:
        root = runs_folder().resolve()
        folder = (root / run).resolve()
        if not folder.is_relative_to(root):
            return run
        return [(snapshot.path.name, snapshot.path.stat().st_mtime_ns) for snapshot in snapshots(folder)]

    @classmethod
    def execute(cls, run: str, profile: str, decay: float, width: float, last_part: float) -> io.NodeOutput:
        with torch.inference_mode(False):
            lora, text = average(runs_folder(), run, Profile(profile, decay, width, last_part))
        return io.NodeOutput(lora, text)


NODES: list[type[io.ComfyNode]] = [TesseraAverageStates]

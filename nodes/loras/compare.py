"""Compare LoRAs: a grid of samples with a column for each LoRA."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import comfy.utils
import torch
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io, ui
from torch import Tensor

from ...common.text import quoted
from ...data.folders.dataset import Dataset
from ...train.preview.compare import Column, compare, two_experts
from ...train.preview.sampling import Conditioning, Sampling, Stages
from ...train.preview.scores import AS_LISTED, ORDERS
from ...train.watch.previewer import Preview
from ..common.images import image_tensor
from ..common.types import DatasetType, LoraModelType, PreviewType
from ..options.preview import sampler_inputs
from .compare_columns import (
    compared_files,
    compared_model_pairs,
    compared_models,
    compared_pairs,
    read_pair_strengths,
    read_strengths,
)
from .compare_scores import ScoreInputs
from .expert_pairs import Pair, pairs
from .lora_list import NONE, listed_runs, loras_named, path_of

LoraModels = Mapping[str, Mapping[str, Tensor] | None]
# Frames shown per clip, 0 for an animation, see `contact_sheet.render_frames`.
CLIPS = {"middle frame": 1, "3 frames": 3, "5 frames": 5, "9 frames": 9, "animation": 0}


class TesseraCompareLoras(io.ComfyNode):
    """Grid of pictures with a row for each prompt and seed and a column for each LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraCompareLoras",
            display_name="Compare LoRAs",
            category="Tessera/output",
            description="Samples the same prompts and seeds with several LoRAs, or with all saves of one training "
            "run, and shows the pictures side by side.",
            search_aliases=["lora grid", "xy plot", "compare checkpoints", "best epoch"],
            is_output_node=True,
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            inputs=[
                io.Model.Input("model", tooltip="The model that the LoRAs are for, from any loader. It isn't changed."),
                io.Vae.Input("vae", tooltip="The model's own VAE, which decodes the pictures."),
                io.Conditioning.Input("positive", tooltip="The prompt, as it goes to your KSampler."),
                io.String.Input(
                    "loras",
                    default="",
                    multiline=True,
                    placeholder="one LoRA per line, such as my_lora (001)/*",
                    tooltip="LoRAs by the names that ComfyUI's LoRA loaders list, one per line. * stands for any text: "
                    "my_lora (*)/* is every save of the runs of that name.",
                ),
                io.Combo.Input(
                    "run",
                    options=[NONE, *listed_runs()],
                    default=NONE,
                    tooltip="A training run, whose saves are compared in the order of their steps; the newest is "
                    "marked. Press R to see new ones.",
                ),
                io.String.Input(
                    "strengths",
                    default="1",
                    tooltip="How strongly each LoRA is applied. Several numbers, such as 0.6, 1, give a column each.",
                ),
                io.Boolean.Input(
                    "without_lora",
                    default=True,
                    advanced=True,
                    tooltip="Adds a first column without a LoRA, to compare with.",
                ),
                *sampler_inputs(),
                PreviewType.Input(
                    "more_prompts",
                    optional=True,
                    tooltip="From Training Preview: more prompts with their own settings, each in its own rows. Its "
                    "every_n_steps and model inputs are ignored here.",
                ),
                io.Autogrow.Input(
                    "lora_models",
                    optional=True,
                    template=io.Autogrow.TemplatePrefix(LoraModelType.Input("lora"), prefix="lora", min=0, max=16),
                    tooltip="LoRAs of the graph, such as Train LoRA's output; another input appears when one is "
                    "connected.",
                ),
                io.Model.Input(
                    "model_low_noise",
                    optional=True,
                    tooltip="Wan 2.2's low noise expert, with the high noise one at model: pairs of LoRAs are compared "
                    "then, and both experts sample, as two KSampler (Advanced) do. Name one half of each in loras.",
                ),
                io.Autogrow.Input(
                    "lora_models_low_noise",
                    optional=True,
                    template=io.Autogrow.TemplatePrefix(LoraModelType.Input("lora"), prefix="lora", min=0, max=16),
                    tooltip="The low noise halves of lora_models, in the same order: Train LoRA's lora_low_noise.",
                ),
                io.Float.Input(
                    "expert_boundary",
                    default=0.0,
                    min=0.0,
                    max=0.999,
                    step=0.001,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="The sigma at which sampling switches from one expert to the other. 0 uses the model's "
                    "own: 0.875 for text to video, 0.9 for image to video.",
                ),
                io.Int.Input(
                    "switch_step",
                    default=0,
                    min=0,
                    max=10000,
                    optional=True,
                    advanced=True,
                    tooltip="How many steps the high noise expert does, like end_at_step of its KSampler (Advanced). "
                    "0 uses expert_boundary instead.",
                ),
                io.Combo.Input(
                    "clips",
                    options=list(CLIPS),
                    default="middle frame",
                    optional=True,
                    advanced=True,
                    tooltip="How the grid shows a clip: its middle frame, some frames from first (top) to last, or, "
                    "with animation, the clips themselves side by side. Pictures are not affected.",
                ),
                io.Float.Input(
                    "fps",
                    default=Sampling.fps,
                    min=1.0,
                    max=120.0,
                    step=1.0,
                    optional=True,
                    advanced=True,
                    tooltip="Frames per second of the animation on this node: 16 for Wan 2.1 and 2.2 14B, 24 for Wan "
                    "2.2 5B.",
                ),
                io.ClipVision.Input(
                    "clip_vision",
                    optional=True,
                    tooltip="Any CLIP vision model, from Load CLIP Vision: gives each LoRA a score for variety, how "
                    "much its pictures differ, and with training_pictures one for likeness.",
                ),
                DatasetType.Input(
                    "training_pictures",
                    optional=True,
                    tooltip="From Training Images: the pictures that likeness is measured to, at most 100 of them.",
                ),
                io.Combo.Input(
                    "sort_by",
                    options=list(ORDERS),
                    default=AS_LISTED,
                    optional=True,
                    advanced=True,
                    tooltip="The order of the LoRAs, the best first. likeness and variety need clip_vision, and "
                    "validation loss needs saves of a run with Training Validation.",
                ),
            ],
            outputs=[
                io.Image.Output(
                    display_name="grid",
                    tooltip="The grid with all names. Clips are shown as chosen in clips; with animation it is one "
                    "frame per moment, for Create Video.",
                ),
                io.Image.Output(
                    display_name="pictures",
                    is_output_list=True,
                    tooltip="Each picture or clip by itself in full size, row by row.",
                ),
            ],
        )

    @classmethod
    def validate_inputs(
        cls, run: str | None = None, lora_models: Any = None, lora_models_low_noise: Any = None
    ) -> bool | str:
        """Check `run`; None if linked. ComfyUI passes Autogrow inputs to every validator."""
        if run not in (None, NONE) and run not in listed_runs():
            return f"run: there is no run {quoted(run)} any more; choose another, or {NONE!r}."
        return True

    @classmethod
    def fingerprint_inputs(cls, loras: str | None = None, run: str | None = None, **inputs: Any) -> Any:
        if loras is None or run is None:  # linked, value unknown: count as changed
            return float("nan")
        try:
            names = _files(pairs(loras, run)) if "model_low_noise" in inputs else loras_named(loras, run)
            return [(name, path_of(name).stat().st_mtime_ns) for name in names]
        except (OSError, ValueError) as error:  # execute reports it
            return str(error)

    @classmethod
    def execute(  # noqa: PLR0913
        cls,
        model: ModelPatcher,
        vae: Any,
        positive: Conditioning,
        loras: str,
        run: str,
        strengths: str,
        without_lora: bool,
        more_prompts: Sequence[Preview] = (),
        lora_models: LoraModels | None = None,
        model_low_noise: ModelPatcher | None = None,
        lora_models_low_noise: LoraModels | None = None,
        expert_boundary: float = 0.0,
        switch_step: int = 0,
        clips: str = "middle frame",
        clip_vision: Any = None,
        training_pictures: Dataset | None = None,
        sort_by: str = AS_LISTED,
        **sampler: Any,
    ) -> io.NodeOutput:
        if clips not in CLIPS:
            raise ValueError(f"clips is {quoted(clips)}; choose one of {', '.join(CLIPS)}.")
        samplings = [Sampling(vae, positive, **sampler), *(preview.sampling for preview in more_prompts)]
        high, low = lora_models or {}, lora_models_low_noise or {}
        if model_low_noise is None:
            _check_one_model(low, expert_boundary, switch_step)
            stages = Stages(model)
            compared = compared_files(loras_named(loras, run)) + compared_models(high)
            strength_pairs = [(strength, strength) for strength in read_strengths(strengths)]
        else:
            stages = two_experts(model, model_low_noise, expert_boundary, switch_step)
            compared = compared_pairs(pairs(loras, run)) + compared_model_pairs(high, low)
            strength_pairs = read_pair_strengths(strengths)
        if not compared:
            raise ValueError("loras is empty; name LoRAs, choose a run, or connect the LORA_MODEL of Train LoRA.")
        first = [Column("without LoRA")] if without_lora else []
        columns = [*first, *(column for entry in compared for column in entry.columns(strength_pairs))]
        rows = sum(sampling.seeds for sampling in samplings)
        score_inputs = ScoreInputs(sort_by, clip_vision, training_pictures)
        scorer = score_inputs.scorer(columns, rows, throw_exception_if_processing_interrupted)
        calls = len(columns) * sum(sampling.seeds * sampling.steps for sampling in samplings)
        bar = comfy.utils.ProgressBar(calls, node_id=getattr(cls.hidden, "unique_id", None))

        def tell() -> None:
            throw_exception_if_processing_interrupted()
            bar.update(1)

        comparison = compare(
            stages,
            samplings,
            columns,
            tell,
            throw_exception_if_processing_interrupted,
            CLIPS[clips],
            scorer,
        )
        grid = torch.cat([image_tensor(sheet) for sheet in comparison.grid])
        ui = cls._grid_preview(grid, samplings[0].fps).as_dict()
        if comparison.notes or comparison.scores:
            scores = [asdict(score) for score in comparison.scores]
            ui["tessera"] = [{"notes": comparison.notes, **({"scores": scores} if scores else {})}]
        return io.NodeOutput(grid, comparison.pictures, ui=ui)

    @classmethod
    def _grid_preview(cls, grid: Tensor, fps: float) -> ui.PreviewImage | ui.SavedImages:
        if len(grid) == 1:
            return ui.PreviewImage(grid, cls=cls)
        webp_options: dict[str, Any] = {"lossless": False, "quality": 90, "method": 4}
        saved = ui.ImageSaveHelper.save_animated_webp(
            grid, "compare_loras", io.FolderType.temp, cls, fps, **webp_options
        )
        return ui.SavedImages([saved], is_animated=True)


def _check_one_model(low: LoraModels, expert_boundary: float, switch_step: int) -> None:
    """Check inputs that need two experts. Raises ValueError if one is set without them."""
    pair_inputs = {
        "lora_models_low_noise": any(lora is not None for lora in low.values()),
        "expert_boundary": bool(expert_boundary),
        "switch_step": bool(switch_step),
    }
    if name := next((name for name, is_given in pair_inputs.items() if is_given), None):
        raise ValueError(f"{name} is for two experts; connect model_low_noise, or leave {name} out.")


def _files(pairs: Sequence[Pair]) -> list[str]:
    return [half for pair in pairs for half in (pair.high, pair.low) if half is not None]


NODES: list[type[io.ComfyNode]] = [TesseraCompareLoras]

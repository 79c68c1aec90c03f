"""The node that shows several LoRAs side by side."""

import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import comfy.utils
import folder_paths
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io, ui
from torch import Tensor

from ..train.compare import Column, compare
from ..train.preview import Preview
from ..train.sampling import Conditioning, Sampling
from .images import image_tensor
from .output import LoraModelType
from .preview import PreviewType, sampler_inputs

NONE = "none"
MOST_LORAS = 32
_STEP = re.compile(r"-step(\d{6,})$")


class TesseraCompareLoras(io.ComfyNode):
    """A grid of pictures: a row for each prompt and seed, a column for each LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraCompareLoras",
            display_name="Compare LoRAs",
            category="Tessera/output",
            description="Samples the same prompts and seeds with several LoRAs, or with the saves of one training run, "
            "and shows the pictures side by side with their names.",
            search_aliases=["lora grid", "xy plot", "compare checkpoints", "best epoch"],
            is_output_node=True,
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            inputs=[
                io.Model.Input(
                    "model", tooltip="The model that the LoRAs are for, from any loader. It stays as it is."
                ),
                io.Vae.Input("vae", tooltip="The model's own VAE, which decodes the pictures."),
                io.Conditioning.Input("positive", tooltip="The prompt, as it goes to your KSampler."),
                io.String.Input(
                    "loras",
                    default="",
                    multiline=True,
                    placeholder="one LoRA per line, such as my_lora-1a2b3c4d/*",
                    tooltip="LoRAs by the names that ComfyUI's LoRA loaders list, one per line. * stands for any text: "
                    "my_lora-*/* is every save of the runs of that name.",
                ),
                io.Combo.Input(
                    "run",
                    options=[NONE, *runs()],
                    default=NONE,
                    tooltip="A training run, whose saves are compared in the order of their steps, the finished LoRA "
                    "last. Press R to see new ones.",
                ),
                io.String.Input(
                    "strengths",
                    default="1",
                    tooltip="How strongly each LoRA is applied. Several numbers, such as 0.6, 1, give a column each.",
                ),
                io.Boolean.Input(
                    "without_lora",
                    default=True,
                    tooltip="The first column is the model without a LoRA, to compare with.",
                ),
                *sampler_inputs(),
                PreviewType.Input(
                    "more_prompts",
                    optional=True,
                    tooltip="From Training Preview: further prompts with their own settings, each in rows of its own. "
                    "When it says to preview has no meaning here.",
                ),
                io.Autogrow.Input(
                    "lora_models",
                    optional=True,
                    template=io.Autogrow.TemplatePrefix(LoraModelType.Input("lora"), prefix="lora", min=0, max=16),
                    tooltip="LoRAs of the graph, such as Train LoRA's output; another place appears when one is taken.",
                ),
            ],
            outputs=[
                io.Image.Output(
                    display_name="grid", tooltip="All pictures with their names; of a clip its middle frame."
                ),
                io.Image.Output(
                    display_name="pictures",
                    is_output_list=True,
                    tooltip="Each picture or clip by itself in full size, row by row.",
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, run: str | None, lora_models: Any = None) -> bool | str:
        """run: None where it is linked; lora_models: ComfyUI hands inputs that grow to whoever checks anything."""
        if run not in (None, NONE) and run not in runs():
            return f"run: there is no run {run!r} any more; choose another, or {NONE!r}."
        return True

    @classmethod
    def fingerprint_inputs(cls, loras: str | None = None, run: str | None = None, **_: Any) -> Any:
        if loras is None or run is None:  # linked: not known yet, so taken as changed
            return float("nan")
        try:
            return [(name, _path(name).stat().st_mtime_ns) for name in named(loras, run)]
        except (OSError, ValueError) as error:  # told to the user by execute
            return str(error)

    @classmethod
    def execute(
        cls,
        model: ModelPatcher,
        vae: Any,
        positive: Conditioning,
        loras: str,
        run: str,
        strengths: str,
        without_lora: bool,
        more_prompts: Sequence[Preview] = (),
        lora_models: Mapping[str, Mapping[str, Tensor] | None] | None = None,
        **sampler: Any,
    ) -> io.NodeOutput:
        samplings = [Sampling(vae, positive, **sampler), *(preview.sampling for preview in more_prompts)]
        connected = [lora for lora in (lora_models or {}).values() if lora is not None]
        columns = columns_of(named(loras, run), connected, read_strengths(strengths))
        if not columns:
            raise ValueError("loras is empty; name LoRAs, choose a run, or connect the LORA_MODEL of Train LoRA.")
        if without_lora:
            columns.insert(0, Column("without LoRA", "", 0.0, None))
        calls = len(columns) * sum(sampling.seeds * sampling.steps for sampling in samplings)
        bar = comfy.utils.ProgressBar(calls, node_id=getattr(cls.hidden, "unique_id", None))

        def tell() -> None:
            throw_exception_if_processing_interrupted()
            bar.update(1)

        made = compare(model, samplings, columns, tell)
        grid = image_tensor(made.grid)
        return io.NodeOutput(grid, made.pictures, ui=ui.PreviewImage(grid, cls=cls))


def _listed() -> list[str]:
    """The LoRA files that ComfyUI lists, with slashes on every system, in the order of their names and steps."""
    names = (name.replace("\\", "/") for name in folder_paths.get_filename_list("loras"))
    return sorted((name for name in names if name.endswith(".safetensors")), key=_order)


def _order(name: str) -> tuple[str, str, float]:
    """A run's saves by step, the finished LoRA after them."""
    place = PurePosixPath(name)
    step = _STEP.search(place.stem)
    stem = place.stem[: step.start()] if step else place.stem
    return str(place.parent), stem, float(step.group(1)) if step else math.inf


def _path(name: str) -> Path:
    listed = {other.replace("\\", "/"): other for other in folder_paths.get_filename_list("loras")}
    return Path(folder_paths.get_full_path_or_raise("loras", listed[name]))


def runs() -> list[str]:
    """The folders that hold saves of a training run, as ComfyUI lists LoRAs."""
    places = map(PurePosixPath, _listed())
    return sorted({str(p.parent) for p in places if _STEP.search(p.stem) and str(p.parent) != "."})


def named(loras: str, run: str) -> list[str]:
    """The LoRAs that the lines and the run stand for, each once. Raises ValueError for a line that stands for none."""
    listed = _listed()
    lines = [line.strip().replace("\\", "/") for line in loras.splitlines() if line.strip()]
    found: list[str] = []
    for line in lines:
        matches = [name for name in listed if line in (name, name.removesuffix(".safetensors"))]
        matches = matches or [name for name in listed if fnmatchcase(name, line)]
        if not matches:
            raise ValueError(
                f"loras: {line!r} is the name of no LoRA that ComfyUI lists; write it as a LoRA loader shows it, "
                "or with * for any text."
            )
        found += matches
    if run != NONE:
        found += [name for name in listed if str(PurePosixPath(name).parent) == run]
    found = list(dict.fromkeys(found))
    if len(found) > MOST_LORAS:
        raise ValueError(f"loras: these are {len(found)} LoRAs, and a grid takes {MOST_LORAS}; name fewer.")
    return found


def read_strengths(text: str) -> list[float]:
    """Numbers between commas or spaces. Raises ValueError for anything else."""
    parts = [part for part in re.split(r"[,;\s]+", text) if part]
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < abs(number) <= 100 for number in numbers):
        raise ValueError(f"strengths is {text!r}; give one or more numbers other than 0, such as 0.6, 1.")
    return list(dict.fromkeys(numbers))


def columns_of(
    names: Sequence[str], connected: Sequence[Mapping[str, Tensor]], strengths: Sequence[float]
) -> list[Column]:
    """A column for each LoRA and strength: those of files first, then those of the graph."""
    stems = [PurePosixPath(name).stem for name in names]
    columns = []
    for name, stem in zip(names, stems, strict=True):
        title = stem if stems.count(stem) == 1 else name.removesuffix(".safetensors")
        columns += [Column(_titled(title, s, strengths), name, s, partial(_read, name)) for s in strengths]
    for number, lora in enumerate(connected, 1):
        title = getattr(lora, "metadata", {}).get("ss_output_name") or f"lora {number}"
        name = f"lora_models {number}"
        columns += [Column(_titled(title, s, strengths), name, s, partial(dict, lora)) for s in strengths]
    return columns


def _titled(title: str, strength: float, strengths: Sequence[float]) -> str:
    return title if list(strengths) == [1.0] else f"{title} x {strength:g}"


def _read(name: str) -> dict[str, Tensor]:
    return comfy.utils.load_torch_file(str(_path(name)), safe_load=True)


NODES: list[type[io.ComfyNode]] = [TesseraCompareLoras]

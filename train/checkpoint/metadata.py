"""Metadata of a LoRA file, in its safetensors header.

`modelspec.*`: Stability AI's ModelSpec (github.com/Stability-AI/ModelSpec), version 1.0.1 as kohya's scripts write it.
`ss_*`: kohya's keys that model managers read, only those that apply to our run.
`tessera`: all settings of the run as JSON.
`tessera_modules`: the names of the base model's modules, if no family has a table of them.
`tessera_best`: validation record of the LoRA with the lowest validation loss.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import comfyui_version
import torch
from comfy.model_patcher import ModelPatcher
from safetensors import SafetensorError
from torch import Tensor

from ...common.core import loaded_from
from ...common.untrusted.tensor_files import metadata_field, open_tensors
from ...data.samples import TrainingData, data_facts, shown_per_epoch, trigger_words
from ...lora.files.header import for_file, last_part, without_paths
from ...lora.files.lora_model import MODULES, LoraModel
from ...lora.files.spellings import ALPHA, DOWN
from ...lora.options import NetworkOptions
from ...lora.plan import base_spec
from ...memory.low_bit.quantize import AS_STORED, quantize_of
from ...models.adapters.registry import adapter_kind
from ...models.family import Family, Origin
from ..config.environment import VERSION
from ..config.settings import MemoryOptions, TrainSettings
from ..objective.options import ObjectiveOptions
from ..optim.options import OptimizerOptions

BEST = "tessera_best"

# (step, last loss, LoRA) → the metadata of its file.
Describe = Callable[[int, float | None, LoraModel], dict[str, str]]


@dataclass(frozen=True)
class RunFacts:
    """Facts of a training run for the metadata of its LoRA.

    output_name: path of the LoRA below the LoRA folder.
    family: name of the model family, such as `flux`.
    variant: variant in the family, such as `dev`.
    origin: names of the model in other tools.
    base_model: file name of the checkpoint, empty if unknown.
    steps: optimizer steps done.
    batch_size: samples of a micro-batch.
    gradient_accumulation: micro-batches of an optimizer step.
    seed: seed of the run.
    network: options of the LoRA.
    optimizer: options of the optimizer.
    objective: options of the objective.
    memory: options of memory use.
    resolution: `<width>x<height>` in pixels of the first sample.
    samples: samples per epoch, repeats counted.
    started: ISO 8601 with an offset.
    finished: ISO 8601 with an offset.
    final_loss: last loss, None before the first step.
    tessera_version: version of this pack.
    comfyui_version: version of ComfyUI.
    torch_version: version of torch.
    data: facts of the training data, see `data_facts`.
    validation: options of validation, None without it.
    saving: save intervals and number of retained LoRAs.
    compile: 'auto' or 'off'.
    continued_from: earlier segments with other settings, see `history.continued_from`.
    loader_quantize: format that Load Diffusion Model converted the model to, one of QUANTIZE.
    modules: names of the model's modules, if its LoRA files have to record them, see `NameTable.recorded`.
    """

    output_name: str
    family: str
    variant: str
    origin: Origin
    base_model: str
    steps: int
    batch_size: int
    gradient_accumulation: int
    seed: int
    network: NetworkOptions
    optimizer: OptimizerOptions
    objective: ObjectiveOptions
    memory: MemoryOptions
    resolution: str
    samples: int
    started: str
    finished: str
    final_loss: float | None
    tessera_version: str
    comfyui_version: str
    torch_version: str
    data: Mapping[str, Any] = field(default_factory=dict)
    validation: Mapping[str, Any] | None = None
    saving: Mapping[str, int] = field(default_factory=dict)
    compile: str = "auto"
    continued_from: Sequence[Mapping[str, Any]] = ()
    loader_quantize: str = AS_STORED
    modules: str = ""


def plain_facts(facts: RunFacts) -> dict[str, Any]:
    """Return the facts about the run as plain JSON, with absolute paths removed."""
    plain = asdict(facts)
    del plain["modules"]  # belongs to the model and has its own metadata key
    return without_paths(plain)


def metadata_for(facts: RunFacts, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Build the header of a LoRA file of this run for kohya's keys; `for_file` adapts it to another format.

    Every value is a string. Absolute paths are cut to their last part, also inside texts.
    """
    settings = plain_facts(facts)
    network, optimizer = facts.network, facts.optimizer
    entries: dict[str, Any] = {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{facts.origin.architecture}/lora",
        "modelspec.implementation": facts.origin.implementation,
        "modelspec.title": last_part(facts.output_name),
        "modelspec.date": facts.finished,
        "modelspec.resolution": facts.resolution,
        "modelspec.trigger_phrase": trigger_words(settings["data"].get("made_with", {})),
        "ss_output_name": last_part(facts.output_name),
        "ss_sd_model_name": settings["base_model"],
        "ss_base_model_version": facts.origin.kohya_version,
        "ss_network_module": facts.origin.kohya_module if network.kind.in_kohya else "lycoris.kohya",
        "ss_network_dim": network.rank * network.kind.file_ranks,
        "ss_network_alpha": network.alpha * network.kind.file_ranks,
        "ss_network_dropout": network.dropout,
        "ss_network_args": _network_args(network, tensors),
        "ss_scale_weight_norms": network.scale_weight_norms or None,
        "ss_learning_rate": optimizer.learning_rate,
        "ss_optimizer": optimizer.display_name,
        "ss_optimizer_args": ", ".join(settings["optimizer"]["optimizer_args"].split("\n")),
        "ss_lr_scheduler": optimizer.lr_scheduler,
        "ss_lr_warmup_steps": optimizer.warmup_steps,
        "ss_max_grad_norm": optimizer.max_grad_norm,
        "ss_steps": facts.steps,
        "ss_batch_size_per_device": facts.batch_size,
        "ss_total_batch_size": facts.batch_size * facts.gradient_accumulation,
        "ss_gradient_accumulation_steps": facts.gradient_accumulation,
        "ss_gradient_checkpointing": facts.memory.checkpointing != "none",
        "ss_guidance_scale": facts.objective.guidance,
        "ss_num_train_images": facts.samples,
        "ss_resolution": facts.resolution,
        "ss_seed": facts.seed,
        "ss_training_started_at": _unix(facts.started),
        "ss_training_finished_at": _unix(facts.finished),
        MODULES: facts.modules,
        "tessera": json.dumps(settings, ensure_ascii=False, sort_keys=True, allow_nan=False),
    }
    return for_file({key: str(value) for key, value in entries.items() if value not in ("", None)}, tensors, "kohya")


def _network_args(network: NetworkOptions, tensors: Mapping[str, Tensor]) -> str:
    """Format the network module's arguments as kohya's scripts do: JSON of strings, empty without arguments."""
    spec = base_spec(network)
    args = adapter_kind(spec).network_args(spec) | {
        name: value for name in ("rank_dropout", "module_dropout") if (value := getattr(network, name))
    }
    if network.lora_plus_ratio != 1:
        args["loraplus_lr_ratio"] = network.lora_plus_ratio
    args |= _conv_args(tensors)
    return json.dumps({name: str(value) for name, value in args.items()}) if args else ""


def _conv_args(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the most common rank and alpha of the convolutions with a kernel larger than 1 × 1, under kohya's names;
    empty without such convolutions."""
    sizes = Counter(
        (len(down), float(tensors[f"{key.removesuffix(DOWN)}{ALPHA}"]))
        for key, down in tensors.items()
        if key.endswith(DOWN) and down.dim() == 4 and down[0, 0].numel() > 1
    )
    return {} if not sizes else dict(zip(("conv_dim", "conv_alpha"), sizes.most_common(1)[0][0], strict=True))


def _unix(moment: str) -> str:
    """Convert ISO 8601 to seconds since 1970, the format of kohya's scripts."""
    return str(datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()) if moment else ""


def utc_now() -> str:
    """Return the current time in UTC, ISO 8601 with an offset."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def collect_facts(
    settings: TrainSettings, family: Family, patcher: ModelPatcher, data: TrainingData, started: str
) -> RunFacts:
    """Collect the facts of a run before its first step."""
    _, height, width = data.samples[0].grid
    pixels = family.sampling.latents(patcher.model).pixels_per_token
    return RunFacts(
        output_name=settings.output_name,
        family=family.name,
        variant=family.variant(patcher.model),
        origin=family.origin(patcher.model),
        base_model=Path(loaded_from(patcher)).name,
        steps=0,
        batch_size=settings.batch_size,
        gradient_accumulation=settings.gradient_accumulation,
        seed=settings.seed,
        network=settings.network.for_high_noise(),
        optimizer=settings.optimizer,
        objective=settings.objective,
        memory=settings.memory,
        resolution=f"{width * pixels}x{height * pixels}",
        samples=shown_per_epoch(data.samples),
        started=started,
        finished=started,
        final_loss=None,
        tessera_version=VERSION,
        comfyui_version=comfyui_version.__version__,
        torch_version=torch.__version__,
        data=data_facts(data),
        validation=settings.validation.facts() if settings.validation else None,
        saving={name: getattr(settings, name) for name in ("save_every", "save_every_epochs", "keep_last")},
        compile=settings.compile,
        loader_quantize=quantize_of(patcher),
        modules=family.names.recorded(),
    )


def metadata_writer(facts: RunFacts) -> Describe:
    """Return a function that builds the metadata of this run's LoRA files."""

    def describe(step: int, loss: float | None, lora: LoraModel) -> dict[str, str]:
        return metadata_for(replace(facts, steps=step, final_loss=loss, finished=utc_now()), lora)

    return describe


@dataclass(frozen=True)
class Best:
    """LoRA with the lowest validation loss so far.

    file: name of its file.
    step: optimizer steps it was trained for.
    loss: mean validation loss.
    validation_key: see `RunContext.validation_key`.
    """

    file: str
    step: int
    loss: float
    validation_key: str

    def plain(self) -> dict[str, Any]:
        """Return the record as JSON, for a file's header and the summary."""
        return {"file": self.file, "step": self.step, "loss": self.loss, "of": self.validation_key}


def read_best(path: Path) -> Best | None:
    """Read the record that `keep_best` wrote into a file's header; None for any other file."""
    try:
        with open_tensors(path) as file:
            plain = dict(metadata_field(file.metadata(), BEST))
            return Best(validation_key=plain.pop("of"), **plain)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None

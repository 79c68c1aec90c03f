"""What a LoRA file says about itself, in its safetensors header.

`modelspec.*`: Stability AI's ModelSpec (github.com/Stability-AI/ModelSpec), version 1.0.1 as kohya's scripts write it.
`ss_*`: kohya's keys that model managers read, only those that are true of our run.
`tessera`: all settings of the run as JSON.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from torch import Tensor, uint8

from ..models.family import Origin
from .options import MemoryOptions, NetworkOptions, ObjectiveOptions, OptimizerOptions

_ABSOLUTE = re.compile(r"(/|~|\\|[A-Za-z]:[/\\]|file:)", re.IGNORECASE)


@dataclass(frozen=True)
class RunFacts:
    """What is known of a training run when its LoRA is written.

    family and variant: such as `flux` and `dev`. origin: what other tools call the model. base_model: the checkpoint's
    file name, empty where it is not known. steps: optimizer steps done. samples: pictures per epoch, repeats counted.
    resolution: `<width>x<height>` of a picture of the planned size. started and finished: ISO 8601 with an offset.
    final_loss: None before the first step.
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


def metadata_for(facts: RunFacts, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The header of a LoRA file of this run in kohya's keys; `for_file` fits it to another format.

    Every value is a string. Text that looks like an absolute path is cut to its last part.
    """
    settings = _without_paths(asdict(facts))
    network, optimizer = facts.network, facts.optimizer
    known: dict[str, Any] = {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{facts.origin.architecture}/lora",
        "modelspec.implementation": facts.origin.implementation,
        "modelspec.title": _last_part(facts.output_name),
        "modelspec.date": facts.finished,
        "modelspec.resolution": facts.resolution,
        "ss_output_name": _last_part(facts.output_name),
        "ss_sd_model_name": settings["base_model"],
        "ss_base_model_version": facts.origin.kohya_version,
        "ss_network_module": facts.origin.kohya_module,
        "ss_network_dim": network.rank,
        "ss_network_alpha": network.alpha,
        "ss_network_dropout": network.dropout,
        "ss_learning_rate": optimizer.learning_rate,
        "ss_optimizer": optimizer.optimizer_class if optimizer.optimizer == "custom" else optimizer.optimizer,
        "ss_optimizer_args": ", ".join(optimizer.optimizer_args.split("\n")),
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
        "tessera": json.dumps(settings, ensure_ascii=False, sort_keys=True, allow_nan=False),
    }
    return for_file({key: str(value) for key, value in known.items() if value not in ("", None)}, tensors, "kohya")


def for_file(metadata: Mapping[str, str], tensors: Mapping[str, Tensor], format: str) -> dict[str, str]:
    """The metadata as the file of these tensors in this format says it: its hashes, whose names it uses, no paths."""
    header = {str(key): _without_paths(str(value)) for key, value in metadata.items()}
    if "modelspec.sai_model_spec" in header:
        digest = tensor_hash(tensors)
        header["modelspec.hash_sha256"] = f"0x{digest}"
        header["sshs_model_hash"] = digest
        if format == "diffusers":
            header["modelspec.implementation"] = "diffusers"
        if format != "kohya":
            header.pop("ss_network_module", None)
    return header


def tensor_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the bytes that follow the header in a safetensors file of these tensors, as hexadecimal digits.

    safetensors sorts by dtype, widest first, then by name; two dtypes of one width don't meet in our files.
    """
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(uint8).numpy().data)
    return digest.hexdigest()


def _last_part(text: str) -> str:
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1]


def _without_paths(value: Any) -> Any:
    if isinstance(value, str):
        return _last_part(value) if _ABSOLUTE.match(value.strip()) else value
    if isinstance(value, Mapping):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _unix(moment: str) -> str:
    """Seconds since 1970, as kohya's scripts write times."""
    return str(datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()) if moment else ""

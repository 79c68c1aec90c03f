"""What the LoRA files of a run say of it."""

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import comfyui_version
import torch
from comfy.model_patcher import ModelPatcher

from ...data.samples import TrainingData, data_facts, shown_per_epoch
from ...lora.files.lora_model import LoraModel
from ...models.family import Family
from ..saver import Describe
from ..settings import TrainSettings
from .metadata import RunFacts, metadata_for
from .version import VERSION


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def facts_of(
    settings: TrainSettings, family: Family, patcher: ModelPatcher, data: TrainingData, started: str
) -> RunFacts:
    """What is known of the run before its first step."""
    origin = getattr(patcher, "cached_patcher_init", None)
    source = origin[1][0] if origin and origin[1] and isinstance(origin[1][0], str) else ""
    _, height, width = data.samples[0].grid
    pixels = family.latents(patcher.model).pixels_per_token
    return RunFacts(
        output_name=settings.output_name,
        family=family.name,
        variant=family.variant(patcher.model),
        origin=family.origin(patcher.model),
        base_model=Path(source).name,
        steps=0,
        batch_size=settings.batch_size,
        gradient_accumulation=settings.gradient_accumulation,
        seed=settings.seed,
        network=settings.network.of_high_noise(),
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
    )


def describer(facts: RunFacts) -> Describe:
    """What a LoRA file of this run says of itself."""

    def describe(step: int, loss: float | None, lora: LoraModel) -> dict[str, str]:
        return metadata_for(replace(facts, steps=step, final_loss=loss, finished=now()), lora)

    return describe

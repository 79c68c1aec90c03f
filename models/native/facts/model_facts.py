"""The fields of a named model's facts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...family import UsualSettings
from ...latents import LatentPolicy


@dataclass(frozen=True)
class PreviewDefaults:
    """KSampler settings for a preview, from ComfyUI's template of the model.

    steps: sampling steps.
    cfg: guidance scale.
    sampler: value of sampler_name.
    scheduler: value of scheduler.
    """

    steps: int
    cfg: float
    sampler: str
    scheduler: str


@dataclass(frozen=True, kw_only=True)
class NamedRelease:
    """One file of a model that is published under its own name.

    title: for texts.
    file: the weights file named in the template; empty if no template has it.
    checkpoint: True if the file holds text encoders and VAE too.
    template: ComfyUI's workflow template with file, encoders, VAE and sampling; empty if there is none.
    sampling: settings for previews.
    distilled: True if guidance or steps were distilled into it, which plain training undoes.
    adapter: the LoRA that is active during training on it, and only then; empty if none is known.
    """

    title: str
    file: str = ""
    checkpoint: bool = False
    template: str = ""
    sampling: PreviewDefaults
    distilled: bool = False
    adapter: str = ""


@dataclass(frozen=True)
class Sound:
    """The sound that a model makes along with its video, from one packed latent of both.

    shape: latent frames of the video, and its frame rate if its conditioning sets one → (C, …) of the sound latent.
    sigma: the video's sigma → the sound's, which may have its own schedule.
    """

    shape: Callable[[int, float | None], tuple[int, ...]]
    sigma: Callable[[float], float] = lambda sigma: sigma


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """One model by name.

    name: in metadata and in keys.
    title: in messages.
    model_classes: names of its classes in comfy.model_base.
    configs: names of its classes in comfy.supported_models, if `model_classes` are used by other models too.
    unet_config: entries of ComfyUI's configuration of the model, if all its classes are another model's too.
    default_targets: patterns of the Linears that a LoRA trains; a release lacks some of them.
    shift: timestep shift in training, as `objective.shift_sigma` applies it; None for that of ComfyUI's class.
    guidance: the distilled guidance to train at; None if it takes none.
    megapixels: the size of the pictures, or of the frames of a clip, that it was made for.
    vae: the file of its VAE, empty if the checkpoint contains it or the model works on pixels.
    encoders: the files of its text encoders, in the order of the loader's inputs.
    clip_type: `type` input of its text encoder loader.
    releases: releases of this model, the one to train on first.
    licence: name of a licence that restricts derivatives of the weights; empty for an open one.
    sound: sound along with the video; None for models without.
    latents: policy of the pictures or video; None if ComfyUI's latent format determines it.
    usual: learning rate of a LoRA, and prompt and guidance of a sample.
    batches: False if its forward takes one sample, or lets those of a batch influence each other.
    notes: further remarks for the user before training, a sentence each.
    """

    name: str
    title: str
    model_classes: tuple[str, ...]
    configs: tuple[str, ...] = ()
    unet_config: tuple[tuple[str, Any], ...] = ()
    default_targets: tuple[str, ...]
    shift: float | None = None
    guidance: float | None = None
    megapixels: float = 1.0
    vae: str = ""
    encoders: tuple[str, ...] = ()
    clip_type: str = ""
    releases: tuple[NamedRelease, ...] = ()
    licence: str = ""
    sound: Sound | None = None
    latents: LatentPolicy | None = None
    usual: UsualSettings = UsualSettings()
    batches: bool = True
    notes: tuple[str, ...] = field(default=())

    def remarks(self) -> list[str]:
        """Return sentences for the user before a run: the licence, and the model's own notes."""
        licence = f"{self.title} is under the {self.licence}; read it before you share a LoRA."
        return [*([licence] if self.licence else []), *self.notes]

    def distillation_notes(self) -> list[str]:
        """Return a sentence for each distilled release, with advice."""
        return [_distilled(self, release) for release in self.releases if release.distilled]


def _distilled(facts: ModelFacts, release: NamedRelease) -> str:
    """Make the note on a release. Weights do not distinguish it from its base: the sentence is for both."""
    base = facts.releases[0]
    looked_at = f"train on {base.title} and look at the LoRA on {release.title} (model of Training Preview)"
    ways = [] if base.distilled else [looked_at]
    if release.adapter:
        ways.append(f"choose {release.adapter} at training_adapter of LoRA Network")
    way = ", or ".join(ways) or "keep the run short, and compare previews with the original model"
    if base.distilled:
        return f"{release.title} is distilled, and plain training undoes that: {way}."
    return f"If this is {release.title}: it's distilled, and plain training undoes that; {way}."

"""The fields of a named model's facts."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ...latents import LatentPolicy


@dataclass(frozen=True)
class PreviewDefaults:
    """Settings of KSampler for a preview, as ComfyUI's template of the model has them."""

    steps: int
    cfg: float
    sampler: str
    scheduler: str


@dataclass(frozen=True, kw_only=True)
class NamedRelease:
    """One file of a model that is published under a name of its own.

    title: for texts.
    file: of the weights, as the template names it; empty where no template has them.
    checkpoint: True where the file holds text encoders and VAE too.
    template: ComfyUI's workflow template that file, encoders, VAE and sampling stand in; empty where there is none.
    sampling: of previews.
    distilled: True where guidance or steps were distilled into it, which plain training undoes.
    adapter: the LoRA that people have in force while they train on it, and at no other time; empty where none is known.
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
    """The sound that a model makes beside its video, from one packed latent of both.

    shape: latent frames of the video, and its pictures a second where its conditioning tells them → (C, …) of the
        sound's latent.
    sigma: the video's sigma → the sound's, which may run on a schedule of its own.
    """

    shape: Callable[[int, float | None], tuple[int, ...]]
    sigma: Callable[[float], float] = lambda sigma: sigma


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """One model by name.

    name: in metadata and in keys.
    title: in messages.
    model_classes: names of its classes in comfy.model_base.
    configs: names of its classes in comfy.supported_models, where `model_classes` hold other models too.
    default_targets: patterns of the Linears that a LoRA trains; a release lacks some of them.
    shift: of the timesteps in training, as `objective.shift_sigma` applies it; None for that of ComfyUI's class.
    guidance: the distilled guidance that it is trained at; None where it takes none.
    megapixels: the size of the pictures, or of the frames of a clip, that it was made for.
    vae: the file of its VAE, empty where it stands in the checkpoint or the model works on pixels.
    encoders: the files of its text encoders, in the order of the loader's inputs.
    clip_type: `type` of the loader of its text encoders.
    releases: of this model, the one to train on first.
    licence: the name of one that binds what is made with the weights; empty for an open one.
    sound: beside the video; None for models that make none.
    latents: of the pictures or video; None where ComfyUI's latent format tells them.
    batches: False where its forward takes one sample, or lets those of a batch influence each other.
    notes: what else a user should know before training, a sentence each.
    """

    name: str
    title: str
    model_classes: tuple[str, ...]
    configs: tuple[str, ...] = ()
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
    batches: bool = True
    notes: tuple[str, ...] = field(default=())

    def remarks(self) -> list[str]:
        """Sentences for the user before a run: the licence, and the model's own notes."""
        licence = f"{self.title} is under the {self.licence}; read it before you share a LoRA."
        return [*([licence] if self.licence else []), *self.notes]

    def distillation_notes(self) -> list[str]:
        """A sentence for each distilled release, with what to do about it."""
        return [_distilled(self, release) for release in self.releases if release.distilled]


def _distilled(facts: ModelFacts, release: NamedRelease) -> str:
    """Weights do not tell a distilled release from its base: the sentence is for both."""
    base = facts.releases[0]
    looked_at = f"train on {base.title} and look at the LoRA on {release.title} (model of Training Preview)"
    ways = [] if base.distilled else [looked_at]
    if release.adapter:
        ways.append(f"choose {release.adapter} at training_adapter of LoRA Network")
    way = ", or ".join(ways) or "keep the run short, and compare previews with the original model"
    if base.distilled:
        return f"{release.title} is distilled, and plain training undoes that: {way}."
    return f"If this is {release.title}: it's distilled, and plain training undoes that; {way}."

"""The families that can be trained. A family is one folder; its line in FOLDERS registers it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher

from ...memory.weights.frozen import check_readable
from ..family import Block, Family, ModelInputs, RunBlock, Transformer, UsualSettings
from ..latents import LatentPolicy, policy_of_format
from ..name_table import NameTable, Shape
from ..native.facts.lookup import NAMED, facts_of, named_facts
from ..native.family import NativeFamily
from ..native.forward.precision import cast_floating, computing_in, run_in
from ..native.forward.transformer import NativeTransformer
from ..native.names import native_names
from ..native.text import CoreText
from ..native.verify.core_forward import CoreForward
from ..text import TextPolicy

# Each folder's module `family` has a tuple FAMILIES.
FOLDERS = (
    "flux",
    "qwen_image",
    "wan",
    "chroma",
)
FAMILIES: tuple[Family, ...] = tuple(
    family for folder in FOLDERS for family in import_module(f"..{folder}.family", __package__).FAMILIES
)


def titles() -> tuple[str, ...]:
    """Return the names of the families that can be trained, for texts."""
    return tuple(family.title for family in FAMILIES)


def titles_with_releases() -> tuple[str, ...]:
    """Return the names of the families with the releases that can be trained, for pages."""
    return tuple(f"{family.title} ({family.releases})" for family in FAMILIES)


def family_of(patcher: ModelPatcher) -> Family:
    """Return the family of a MODEL. Raises ValueError, naming the model, if it cannot be trained."""
    _check_is_of_comfyui(patcher.model)
    family = known_family(patcher.model)
    for weight in patcher.model.parameters():
        check_readable(weight)
    return NativeFamily(patcher.model) if family is None else family


def core_forward(family: Family, patcher: ModelPatcher, transformer: Transformer, on_device: RunBlock) -> CoreForward:
    """Make ComfyUI's own forward over the weights of a transformer with our own forward, to compare them."""
    return CoreForward(family, patcher, transformer, on_device)


def in_fp32(transformer: Transformer) -> AbstractContextManager[None]:
    """Return a context in which the layers outside a transformer's blocks compute in fp32, on the stored weights."""
    if isinstance(transformer, NativeTransformer):
        return transformer.in_fp32()
    return computing_in(torch.float32, transformer)


def as_fp32(inputs: ModelInputs) -> ModelInputs:
    """Cast the inputs' 16-bit tensors to fp32, for a forward in `in_fp32`."""
    return cast_floating(inputs, torch.float32)


def run_in_fp32(function: Callable[..., Any], block: Block, *args: Any) -> Any:
    """Call a function on a block and its arguments with its small tensors in fp32."""
    return run_in(torch.float32, function, block, *args)


def _check_is_of_comfyui(model: Any) -> None:
    """Raise ValueError if another node pack has replaced the transformer inside ComfyUI's model, as nunchaku does: a
    family reads its sizes from ComfyUI's own."""
    family, network = related_family(model), getattr(model, "diffusion_model", None)
    network = getattr(network, "_orig_mod", network)  # as torch.compile wraps it
    is_core_class = type(network).__module__.startswith("comfy.")  # a core subclass, which `family_of` reports
    if family is not None and not is_core_class and not isinstance(network, family.transformer_class):
        raise ValueError(
            f"model runs {family.title} as a {type(network).__name__}, which training can't read; load it from a "
            "safetensors file with ComfyUI's own loader or with Load Diffusion Model (Block Swap)."
        )


def related_family(model: Any) -> Family | None:
    """Return the family whose ComfyUI class this model has or derives from; None if there is none. For models that are
    only sampled and may be subclasses that cannot be trained."""
    return next((family for kind in type(model).__mro__ for family in FAMILIES if family.model_class is kind), None)


def known_family(model: Any) -> Family | None:
    """Return the family with our own forward for this model; None if there is none."""
    return next((family for family in FAMILIES if family.matches(model)), None)


def names_of_model(model: Any) -> NameTable:
    """Return the name table of a ComfyUI BaseModel, trainable or not; an empty one for a model with two layers of one
    name in kohya's keys."""
    if (family := known_family(model)) is not None:
        return family.names
    try:
        return native_names(model)
    except ValueError:
        return NameTable({})


def model_latents(model: Any) -> LatentPolicy:
    """Return the geometry of the picture or video latents of a ComfyUI BaseModel, trainable or not."""
    facts = named_facts(model)
    if facts is not None and facts.latents is not None:
        return facts.latents
    return policy_of_format(type(model).__name__, model.latent_format)


def usual_settings(model: Any) -> UsualSettings:
    """Return the usual settings of a ComfyUI BaseModel, trainable or not."""
    family = related_family(model)
    return facts_of(model).usual if family is None else family.usual


def known_by_file_name() -> list[tuple[str, UsualSettings]]:
    """List the titles and usual settings of the models that the names of their files tell; the first match counts."""
    rows = [*((family.title, family.usual) for family in FAMILIES), *((facts.title, facts.usual) for facts in NAMED)]
    return [(title, usual) for title, usual in rows if usual.file_names]


def silent_shape(model: Any, frames: int, frame_rate: float | None) -> tuple[int, ...] | None:
    """Return the shape (C, …) of the sound latent that accompanies a video; None for a model without sound.

    frames: latent frames of the video. frame_rate: pictures per second, if the conditioning sets them.
    """
    facts = named_facts(model)
    return None if facts is None or facts.sound is None else facts.sound.shape(frames, frame_rate)


def text_policy(clip: Any) -> TextPolicy:
    """Recognise the text policy of a CLIP, or make one from its encoders. Raises ValueError for anything but a CLIP of
    ComfyUI."""
    if clip is None:
        raise ValueError(
            "The CLIP input is empty (the checkpoint holds no text encoders); load your model's text encoders with "
            "CLIPLoader or DualCLIPLoader."
        )
    encoder = getattr(clip, "cond_stage_model", clip)
    policies = [family.text for family in FAMILIES]
    for policy in policies:
        # Other models' encoders are subclasses of these, in other modules.
        if isinstance(encoder, policy.encoder) and type(encoder).__module__ == policy.encoder.__module__:
            return policy
    if hasattr(clip, "tokenizer"):
        return CoreText(clip)
    choices = "; ".join(f"{policy.files} for {policy.family}" for policy in policies)
    raise ValueError(
        f"The CLIP holds {_public_name(type(encoder))} text encoders without a ComfyUI tokenizer; load your model's "
        f"text encoders with CLIPLoader, such as one of these: {choices}."
    )


def _public_name(kind: type) -> str:
    """Name an encoder class for messages. Core wraps encoders in ad hoc classes such as `SD3ClipModel_`; their module
    shows the family."""
    return f"{kind.__name__.rstrip('_')} ({kind.__module__.rsplit('.', 1)[-1]})"


def native_name(flat: str) -> str | None:
    """Return the native name of a module from its flat one; None if no family has such a module."""
    return next((name for family in FAMILIES if (name := family.names.native(flat)) is not None), None)


def table_of(modules: Mapping[str, Shape | None], name: str = "") -> NameTable | None:
    """Return the name table of a LoRA's family: the one called `name`, else the one that has most of its modules, and
    in matching shapes; None if no family has any of them.

    modules: the shapes of the weights, as far as known, by flat name; img_in is a module in several families.
    """

    def count_known(family: Family) -> int:
        return sum(family.names.native(flat) is not None for flat in modules)

    def rank(family: Family) -> tuple[bool, int, int]:
        fitting = sum(shape is not None and family.names.fits(flat, shape) for flat, shape in modules.items())
        return family.name == name, count_known(family), fitting

    candidates = [family for family in FAMILIES if count_known(family)]
    return max(candidates, key=rank).names if candidates else None


def resolution_shifts() -> dict[str, Callable[[int], float]]:
    """Return the resolution-dependent shifts of all families' samplers, by the value of timestep_sampling."""
    return {value: shift for family in FAMILIES for value, shift in family.sampling.resolution_shifts.items()}

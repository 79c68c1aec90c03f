"""A LoRA file of any spelling as a LORA_MODEL of one model, to save in another format."""

from collections.abc import Mapping, Sequence
from typing import Any

import comfy.lora
import torch
from torch import Tensor

from ...common.text import quantity, shortlist
from ...models.convolutions import WeightShape, weight_shapes
from ...models.family import Family
from ...models.name_table import flat_name
from .coverage import check_finite, no_layer_met, reading_notes
from .fit import fitting_patches
from .header import PEFT_FIELD, with_header_alphas
from .key_map import layer_of
from .lora_model import MODULES, LoraModel
from .patches import DoesNotFit, Patch, Target, delta_of
from .reader import Patches, join_patches, read_patches
from .spellings import ALPHA, DOWN, UP

# Fields of a header that are right for one file only.
_OF_ONE_FILE = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256", MODULES)


def load_lora(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], family: Family, model: Any, name: str
) -> tuple[LoraModel, list[str]]:
    """Read a file as a LORA_MODEL with the model's own names. Also returns notes for the user, one sentence each.

    name: of the file, with its input, for messages. Raises ValueError if it is of another model, or damaged.
    """
    check_finite(tensors, name)
    tensors, rescaled = with_header_alphas(tensors, metadata)
    try:
        read = read_patches(tensors, family.names, model)
        groups, missing = fitting_patches(read, model)
    except DoesNotFit as error:
        raise ValueError(f"{name} does not fit this model ({error}); connect the model that it is for.") from error
    if not any(groups):
        raise ValueError(no_layer_met(name, read.other_layers, missing, family, model))
    writer = _Writer(model)
    writer.add(groups)
    header = {key: value for key, value in metadata.items() if key not in _OF_ONE_FILE}
    if recorded := family.names.recorded():
        header[MODULES] = recorded
    header.pop(PEFT_FIELD, None)  # its alphas are tensors now
    encoder = {key: tensors[key] for key in read.text_encoder if key in tensors}
    lora = LoraModel(writer.tensors | encoder, header, writer.names, {*writer.verbatim, *encoder})
    notes = [f"{quantity(len(writer.layers), 'layer')} of {family.title} read."]
    if encoder:
        kept = quantity(
            len(encoder),
            "key of text encoders is kept under its name",
            "keys of text encoders are kept under their names",
        )
        notes.append(f"{kept}.")
    if rescaled:
        notes.append(
            f"The file's header sets an alpha for {quantity(rescaled, 'layer')}, as diffusers writes it, and it is "
            "used here. ComfyUI's own loader doesn't read it: sample with the LoRA that this node gives."
        )
    notes += [note for note in reading_notes(name, read) if "text encoder" not in note]
    if missing:
        notes.append(f"{name} also changes parts that this model lacks; they are left out: {shortlist(missing)}.")
    return lora, notes


class _Writer:
    """Collect the patches of a model as tensors of a LORA_MODEL.

    tensors: of the LORA_MODEL.
    names: modules by flat name.
    verbatim: keys in ComfyUI's names of parts of layers.
    layers: modules with an update.
    """

    def __init__(self, model: Any):
        self.model = model
        self.shapes = weight_shapes(model)
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[str, str] = {}
        self.verbatim: set[str] = set()
        self.layers: set[str] = set()
        self._aliases: dict[Target, str] = {}

    def add(self, groups: Sequence[Patches]) -> None:
        """Add all patches; those of one layer are joined into one update."""
        by_layer: dict[str, list[tuple[Target, Patch]]] = {}
        for group in groups:
            for target, content in group.items():
                key, patch = Patch.from_entry(target, content)
                if key.endswith(".weight") and layer_of(key) in self.shapes:
                    by_layer.setdefault(layer_of(key), []).append((target, patch))
                else:
                    self._add_other(key, patch)
        for layer, entries in by_layer.items():
            self._add_layer(layer, entries, self.shapes[layer])

    def _add_layer(self, layer: str, entries: list[tuple[Target, Patch]], shape: WeightShape) -> None:
        self.layers.add(layer)
        patches = [patch for _, patch in entries]
        if len(patches) == 1 and patches[0].is_complete:
            self._put(layer, patches[0].tensors())
            return
        rows, columns = shape[0], torch.Size(shape[1:]).numel()
        if (joined := join_patches(patches, layer, (rows, columns))) is not None:
            kernel = shape[2:]
            down, up = joined[DOWN], joined[UP]
            if kernel:
                down, up = down.reshape(len(down), *shape[1:]), up.reshape(*up.shape, *(1 for _ in kernel))
            self._put(layer, {DOWN: down, UP: up, ALPHA: joined[ALPHA]})
            return
        aliases = [self._alias(target) for target, _ in entries]
        if None not in aliases and len(set(aliases)) == len(aliases):
            for alias, patch in zip(aliases, patches, strict=True):
                for suffix, tensor in patch.tensors().items():
                    self.verbatim.add(f"{alias}.{suffix}")
                    self.tensors[f"{alias}.{suffix}"] = tensor.contiguous()
            return
        if form := next((patch.form for patch in patches if patch.needs_weight), None):
            raise ValueError(
                f"The update of {layer} is in parts, one a {form}, which depends on the weights; no LoRA file can hold "
                "that, so choose another LoRA."
            )
        self._put(layer, {"diff": delta_of(patches, shape, torch.device("cpu"), _no_weight)})

    def _add_other(self, key: str, patch: Patch) -> None:
        """Add the patch of a norm, a bias or another weight than that of a layer."""
        name = key.removeprefix("diffusion_model.")
        tensors = patch.tensors()
        if name.endswith(".weight"):
            self._put(name.removesuffix(".weight"), tensors)
        elif name.endswith(".bias") and tensors.keys() == {"diff"}:
            self._put(name.removesuffix(".bias"), {"diff_b": tensors["diff"]})
        else:
            for suffix, tensor in tensors.items():
                self.verbatim.add(f"{key}.{suffix}")
                self.tensors[f"{key}.{suffix}"] = tensor.contiguous()

    def _put(self, layer: str, tensors: Mapping[str, Tensor]) -> None:
        flat = flat_name(layer)
        self.names[flat] = layer
        self.tensors |= {f"lora_unet_{flat}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
        if DOWN in tensors and ALPHA not in tensors:
            self.tensors[f"lora_unet_{flat}.{ALPHA}"] = torch.tensor(float(len(tensors[DOWN])))

    def _alias(self, target: Target) -> str | None:
        """Return ComfyUI's name of a part of a layer; None if it has none."""
        if not self._aliases:
            for alias, part in comfy.lora.model_lora_keys_unet(self.model, {}).items():
                self._aliases[part] = max(alias, self._aliases.get(part, ""), key=_is_dotted)
        return self._aliases.get(target)


def _is_dotted(alias: str) -> bool:
    return alias.startswith("transformer.")


def _no_weight() -> Tensor:
    raise AssertionError("no update that needs the weight gets here")

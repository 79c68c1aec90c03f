"""Sentences on how much of a LoRA file a model takes, and what it leaves."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, isfinite

from ...common.text import quantity, shortlist
from ...models.convolutions import layer_shapes
from ...models.family import Family
from .reader import LoraPatches


def check_finite(lora: Mapping[str, Tensor], name: str) -> None:
    """Raise ValueError for a tensor with NaN or infinite values. name: of the LoRA, with its input."""
    for key, tensor in lora.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        if not isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all():
            raise ValueError(f"{name} holds NaN or infinite values ({key}); choose an earlier save of it.")


def no_layer_met(name: str, other_layers: Sequence[str], missing: Sequence[str], family: Family, model: Any) -> str:
    """Return the error for a LoRA of which nothing is in the model. name: of the LoRA, with its input."""
    names = list(layer_shapes(model))
    file_layers = [*missing, *other_layers]
    if not file_layers:
        return f"{name} has no update for {family.title}: it has no layers of a diffusion model; choose another LoRA."
    count = quantity(len(file_layers), "layer")
    return (
        f"{name} has no update for {family.title}: 0 of the {count} in the file ({shortlist(file_layers)}) are in this "
        f"model, whose layers are named as {names[len(names) // 2]} is; choose a LoRA of this model."
    )


def encoder_note(input_name: str, count: int) -> str:
    """Say that a LoRA has keys for the text encoder, which training leaves out."""
    keys = quantity(count, "key for the text encoder, which is", "keys for the text encoder, which are")
    return f"{input_name} also has {keys} ignored."


def reading_notes(input_name: str, read: LoraPatches) -> list[str]:
    """Return a sentence for each part of a file that was left out, or read in an unusual way."""
    notes = []
    if read.other_layers:
        all_layers = f"of the {quantity(len(read.layers) + len(read.other_layers), 'layer')} in the file"
        notes.append(
            f"{input_name}: {quantity(len(read.layers), f'{all_layers} is', f'{all_layers} are')} in this model; the "
            f"rest is ignored ({shortlist(read.other_layers)})."
        )
    elif read.unknown:
        count = quantity(len(read.unknown), "key that means", "keys that mean")
        notes.append(f"{input_name} has {count} nothing here, such as {read.unknown[0]}.")
    if read.text_encoder:
        notes.append(encoder_note(input_name, len(read.text_encoder)))
    if read.doubled:
        notes.append(f"{input_name} has several updates of one layer, which are added up: {shortlist(read.doubled)}.")
    return notes

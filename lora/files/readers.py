"""Notes on the programs (ComfyUI, diffusers) that read a LoRA file of each format, from the families' name tables."""

from collections.abc import Mapping

from torch import Tensor

from ...common.text import joined, quantity, shortlist
from .formats import FORMATS
from .lora_model import normalised
from .spellings import ALPHA, DOWN, UP, is_text_encoder

PROGRAMS = ("ComfyUI", "diffusers")
_PAIR = {DOWN, UP, ALPHA}


def reader_notes(lora: Mapping[str, Tensor], format: str) -> list[str]:
    """Name the PROGRAMS that read a file of this LoRA in this format, with a sentence for each that omits something.

    Raises ValueError as `convert` does, for input that is not a LoRA.
    """
    model = normalised(lora)
    table, parts = model.table(), model.parts()
    if table is None:
        return [
            "It's not known which programs read this file, because nothing in it names its model; load it by Load LoRA "
            "File with the model connected, and save that."
        ]
    names = [name for flat in parts if (name := model.name(flat))]
    # On other tensors diffusers' converters fail, or drop the layers that have them.
    extra_suffixes = sorted({suffix for tensors in parts.values() for suffix in tensors} - _PAIR)
    programs, formats = (("ComfyUI",), ("kohya", "comfyui")) if extra_suffixes else (PROGRAMS, FORMATS)
    left_out = {
        program: {f: table.left_out(program, f, names) for f in formats if table.knows(program, f)}
        for program in programs
        if table.knows(program, format)
    }
    readers = [program for program, by_format in left_out.items() if not by_format[format]]
    notes = [f"{joined(readers)} read{'s' if len(readers) == 1 else ''} this file."] if readers else []
    if encoder := [key for key in model.verbatim if is_text_encoder(key)]:
        names_text = "under the name that it had" if len(encoder) == 1 else "under the names that they had"
        notes.append(f"It also holds {quantity(len(encoder), 'key')} of text encoders, {names_text}.")
    if len(encoder) < len(model.verbatim):
        notes.append("Parts of layers that no format can join keep names that ComfyUI reads.")
    for program, by_format in left_out.items():
        if missing := by_format[format]:
            extent = "nothing of it" if len(missing) == len(names) else f"it without {shortlist(missing)}"
            whole = [repr(other) for other, omitted in by_format.items() if not omitted]
            notes.append(f"{program} reads {extent}; for {program} set format to {' or '.join(whole)}.")
    if extra_suffixes:
        notes.append(
            f"diffusers reads plain LoRA only, and this one has {shortlist(extra_suffixes)}; use it in ComfyUI."
        )
    return notes

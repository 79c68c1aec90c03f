"""What is set for a folder and has no effect on it, or contradicts the rest, a sentence each."""

from collections.abc import Iterator
from dataclasses import fields

from ..media.clip_windows import FULL, Extraction
from .options import Treatment

_DEFAULTS = {field.name: field.default for field in fields(Extraction)}
_READ_WITH = {"frame_stride": "slide", "frame_sample": "uniform", "max_frames": FULL}


def folder_notes(folder: str, treatment: Treatment, trigger_words: str, masked: bool) -> Iterator[str]:
    """masked: whether its pictures have masks."""
    if masked and treatment.unmasked_weight == 1:
        yield f"The masks of {folder!r} have no effect: unmasked_weight 1 has what they leave out count whole."
    if trigger_words.strip() and treatment.regularisation:
        yield (
            f"trigger_words stand before the captions of {folder!r} too, which are regularisation and show what the "
            "words are not to call; leave trigger_words empty there."
        )


def extraction_notes(extraction: Extraction) -> Iterator[str]:
    for name, method in _READ_WITH.items():
        if getattr(extraction, name) != _DEFAULTS[name] and extraction.method != method:
            yield f"{name} is not used: it belongs to extraction {method}, which is {extraction.method}."
    if extraction.method == FULL and extraction.target_frames != _DEFAULTS["target_frames"]:
        yield "target_frames is not used: extraction full takes all frames up to max_frames."

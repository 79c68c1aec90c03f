"""Inputs that every folder of training data has, and the chaining of folders."""

from collections.abc import Sequence
from typing import Any

from comfy_api.latest import io

from ...data.layouts.layout import AUTO, LAYOUTS
from ..common.types import DatasetType


def choices(folders: Sequence[str], placeholder: str, examples: Sequence[str] = ()) -> dict[str, Any]:
    """Build the arguments of a Combo of folders; if there are none, a placeholder shows the folder to put files in.

    The browser marks the placeholder as absent. examples: folders of the pack itself, listed last.
    """
    if folders:
        return {"options": [*folders, *examples]}
    return {"options": [placeholder, *examples], "extra_dict": {"placeholder": placeholder}}


def caption_extension(file: str) -> io.Input:
    """Build the input caption_extension. file: example of a file name in the folder, such as a.jpg."""
    return io.String.Input(
        "caption_extension",
        default=".txt",
        optional=True,
        advanced=True,
        tooltip=f"The file ending of captions: {file} uses a.txt. Change it if yours end differently, such as "
        ".caption.",
    )


def repeats(noun: str) -> io.Input:
    """Build the input repeats. noun: name of one of the folder's files, picture or clip."""
    return io.Int.Input(
        "repeats",
        default=1,
        min=1,
        max=1000,
        optional=True,
        tooltip=f"How many times per epoch each {noun} of this folder is shown. Raise it for a small folder that is "
        "chained with a large one.",
    )


def sample_ratio(noun: str) -> io.Input:
    """Build the input sample_ratio. noun: contents of the folder, pictures or clips."""
    return io.Float.Input(
        "sample_ratio",
        default=1.0,
        min=0.001,
        max=1.0,
        step=0.001,
        optional=True,
        advanced=True,
        tooltip="The part of this folder shown per epoch (above 0, up to 1); the next epoch continues with the rest, "
        f"so all {noun} get their turn. Lower it for a large folder that is chained with a small one.",
    )


def trigger_words() -> io.Input:
    return io.String.Input(
        "trigger_words",
        default="",
        optional=True,
        tooltip="Words that are added in front of every caption, with a comma; use them in your prompts later. Leave "
        "it empty if your captions already contain them.",
    )


def layout() -> io.Input:
    return io.Combo.Input(
        "layout",
        options=list(LAYOUTS),
        default=AUTO,
        optional=True,
        advanced=True,
        tooltip="How the folder is read. auto: captions beside the files, and what other trainers know: folder names "
        "such as 10_fox, dataset files (TOML, YAML), metadata.jsonl, masks beside pictures, zip and tar archives; a "
        "note says what was read. plain: only files with a caption beside each. Choose another to insist on it.",
    )


def dataset() -> io.Input:
    return DatasetType.Input(
        "dataset",
        optional=True,
        tooltip="Another folder node, to train on several folders; its pictures and clips come first.",
    )

"""Inputs that every folder of training data has, and the chaining of folders."""

from collections.abc import Sequence
from typing import Any

from comfy_api.latest import io

from ..common.types import DatasetType


def choices(folders: Sequence[str], placeholder: str) -> dict[str, Any]:
    """Arguments of a Combo of folders; where there is none, a placeholder says where to put the files.

    The browser marks the placeholder as absent.
    """
    return {"options": folders} if folders else {"options": [placeholder], "extra_dict": {"placeholder": placeholder}}


def caption_extension(file: str) -> io.Input:
    """file: the name of one of the folder's files, such as a.jpg."""
    return io.String.Input(
        "caption_extension",
        default=".txt",
        optional=True,
        advanced=True,
        tooltip=f"The ending of the caption files: {file} takes a.txt. Change it if yours end otherwise, such as "
        ".caption.",
    )


def repeats(noun: str) -> io.Input:
    """noun: what one of the folder's files is called, picture or clip."""
    return io.Int.Input(
        "repeats",
        default=1,
        min=1,
        max=1000,
        optional=True,
        tooltip=f"How many times an epoch shows each {noun} of this folder. Raise it for a small folder that is "
        "chained with a large one.",
    )


def sample_ratio(noun: str) -> io.Input:
    """noun: what the folder holds, pictures or clips."""
    return io.Float.Input(
        "sample_ratio",
        default=1.0,
        min=0.001,
        max=1.0,
        step=0.001,
        optional=True,
        advanced=True,
        tooltip=f"The part of this folder that an epoch shows, above 0 to 1; the next epoch goes on with the rest, so "
        f"that all {noun} have their turn. Lower it for a large folder that is chained with a small one.",
    )


def trigger_words() -> io.Input:
    return io.String.Input(
        "trigger_words",
        default="",
        optional=True,
        tooltip="Words put before every caption, followed by a comma, to call the LoRA by later. Leave empty if your "
        "captions already hold them.",
    )


def dataset() -> io.Input:
    return DatasetType.Input(
        "dataset",
        optional=True,
        tooltip="Another data set, whose pictures and clips come before these. Connect it to train on several folders.",
    )

"""Scores of the columns of a grid of LoRAs, from the inputs of Compare LoRAs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor

from ...common.text import quoted
from ...data.cache import Cache
from ...data.folders.dataset import Dataset, ImageEntry
from ...data.media.images import inspect_image
from ...data.review.check import Encoder
from ...data.review.measures import embed_pictures
from ...train.preview.compare import Column
from ...train.preview.contact_sheet import Cell, spread
from ...train.preview.scores import (
    AS_LISTED,
    LIKENESS,
    ORDERS,
    VALIDATION,
    VARIETY,
    Encode,
    Scores,
    best_first,
    embed_column,
    likeness,
    variety,
)
from ...train.runs.run_record import RunReader
from ..common.folder_access import cache_folder
from ..common.vision import vision_encoder
from .lora_list import ENDING, path_of, run_folder, step_of

MOST_PICTURES = 100
"""Training pictures that are compared, evenly spread over the folder."""


@dataclass(frozen=True)
class Scorer:
    """Scores the columns of a grid, and sorts them.

    order: one of ORDERS.
    validation: validation loss of each column, None if it is not known.
    first: number of columns without a LoRA, which stay in front.
    encode: computes the embedding of an image; None without an encoder.
    training: embeddings of the training pictures, (N, D) of length 1; None without.
    """

    order: str
    validation: Sequence[float | None]
    first: int = 0
    encode: Encode | None = None
    training: Tensor | None = None

    def __call__(
        self, pictures: Mapping[Cell, Tensor], titles: Sequence[str], check: Callable[[], None]
    ) -> list[Scores]:
        """Score the columns and sort them. pictures: by (row, column). check: called before each picture; may raise."""
        scores = []
        for column, (title, loss) in enumerate(zip(titles, self.validation, strict=True)):
            column_scores = Scores(column, title, validation=loss)
            if self.encode is not None:
                samples = embed_column(pictures, column, self.encode, check)
                cosine = None if self.training is None else likeness(samples, self.training)
                column_scores = replace(column_scores, likeness=cosine, variety=variety(samples))
            scores.append(column_scores)
        return best_first(scores, self.order, self.first)


@dataclass(frozen=True)
class ScoreInputs:
    """Inputs of the node for scores.

    order: `sort_by`.
    clip_vision: CLIP_VISION, None if it is not connected.
    pictures: training pictures, None if they are not connected.
    """

    order: str
    clip_vision: Any = None
    pictures: Dataset | None = None

    def scorer(self, columns: Sequence[Column], rows: int, check: Callable[[], None]) -> Scorer | None:
        """Make the scorer of a grid, before anything is sampled; None if nothing is to be scored.

        rows: number of pictures of each column. check: called before each training picture; may raise.

        Raises ValueError if there is nothing to sort by, and for training pictures that can't be read.
        """
        if self == ScoreInputs(AS_LISTED):
            return None
        losses = [column_loss(column) for column in columns]
        self._check(rows, any(loss is not None for loss in losses))
        first = sum(column.lora is None and column.low_noise is None for column in columns)
        if self.clip_vision is None:
            return Scorer(self.order, losses, first)
        encoder = vision_encoder(self.clip_vision)
        training = None if self.pictures is None else _embedded(self.pictures, encoder, check)
        return Scorer(self.order, losses, first, encoder.encode, training)

    def _check(self, rows: int, has_losses: bool) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"sort_by is {quoted(self.order)}; choose one of {', '.join(ORDERS)}.")
        if self.pictures is not None and self.clip_vision is None:
            raise ValueError("training_pictures is connected without clip_vision; connect Load CLIP Vision there.")
        fix = self._lacking(rows, has_losses)
        if fix:
            raise ValueError(f"sort_by is {self.order}, and there is nothing to sort by; {fix}.")

    def _lacking(self, rows: int, has_losses: bool) -> str:
        """Say how to give the order something to sort by; empty if it has."""
        if self.order == LIKENESS and self.pictures is None:
            return "connect clip_vision and training_pictures"
        if self.order == VARIETY and self.clip_vision is None:
            return "connect clip_vision"
        if self.order == VARIETY and rows < 2:
            return "raise seeds to 2 or more"
        if self.order == VALIDATION and not has_losses:
            return "choose a run that was trained with Training Validation"
        return ""


def _embedded(pictures: Dataset, encoder: Encoder, check: Callable[[], None]) -> Tensor:
    entries = [entry for entry in pictures.entries if isinstance(entry, ImageEntry)]
    if not entries:
        raise ValueError("training_pictures holds no pictures; connect Training Images.")
    files = [(e.path, e.name, inspect_image(e.path, e.name).digest) for e in spread(entries, MOST_PICTURES)]
    rows = embed_pictures(files, encoder.encode, encoder.key, Cache(cache_folder()), lambda *_: None, check)
    return torch.from_numpy(rows)


def column_loss(column: Column) -> float | None:
    """Return the validation loss of the save in a column; None of a pair, and of a LoRA of the graph."""
    if column.lora is None or column.low_noise is not None or not column.lora.name.endswith(ENDING):
        return None
    return validation_loss(column.lora.name)


def validation_loss(name: str) -> float | None:
    """Return the validation loss that a run recorded at the step of a LoRA; None if it recorded none."""
    step = step_of(name)
    if not math.isfinite(step):
        return None
    levels = len(PurePosixPath(name).parts) - len(run_folder(name).parts)
    curve = RunReader(path_of(name).parents[levels - 1]).read()
    _, loss = curve.validation.get(int(step), (step, None))
    return loss

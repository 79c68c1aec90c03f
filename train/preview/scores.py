"""Scores of LoRAs by their pictures: likeness to the training pictures, variety, and the validation loss of a save.

Likeness is CLIP-I of Ruiz et al. 2022 (DreamBooth, arXiv 2208.12242, section 4.2): the mean cosine of the embeddings of
all pairs of a drawn and a training picture. Variety is 1 minus the mean cosine of all pairs of drawn pictures. Neither
says alone which LoRA is best: one that repeats a training picture is very like them, and draws nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .contact_sheet import Cell, middle

Encode = Callable[[Tensor], Tensor]
"""Function of an image (1, H, W, 3), 0 to 1, that returns its embedding (1, D)."""

LIKENESS = "likeness"
VARIETY = "variety"
VALIDATION = "validation loss"
AS_LISTED = "as listed"
ORDERS = (AS_LISTED, LIKENESS, VARIETY, VALIDATION)


@dataclass(frozen=True)
class Scores:
    """Scores of one column of a grid; None for an unknown one.

    column: its number.
    title: its title.
    likeness: -1 to 1.
    variety: 0 to 2; of one picture it is not known.
    validation: validation loss of the run at this save.
    """

    column: int
    title: str
    likeness: float | None = None
    variety: float | None = None
    validation: float | None = None

    @property
    def heading(self) -> str:
        """The title and the scores that are known."""
        scores = {LIKENESS: self.likeness, VARIETY: self.variety, VALIDATION: self.validation}
        text = ", ".join(f"{name} {score:.3f}" for name, score in scores.items() if score is not None)
        return f"{self.title}: {text}" if text else self.title

    def rank(self, order: str) -> tuple[bool, float]:
        """Return the sort key in one of ORDERS: the best first, columns without that score last."""
        keys = {
            LIKENESS: None if self.likeness is None else -self.likeness,
            VARIETY: None if self.variety is None else -self.variety,
            VALIDATION: self.validation,
        }
        key = keys.get(order)
        return key is None, key or 0.0


def likeness(samples: Tensor, training: Tensor) -> float:
    """Compute the mean cosine of all pairs. samples: (N, D), training: (M, D), rows of length 1."""
    return float((samples @ training.T).mean())


def variety(samples: Tensor) -> float | None:
    """Compute 1 minus the mean cosine of all pairs of rows of length 1, (N, D); None for fewer than two rows."""
    count = len(samples)
    if count < 2:
        return None
    products = samples @ samples.T
    return float(1 - (products.sum() - products.diagonal().sum()) / (count * (count - 1)))


def embed_column(pictures: Mapping[Cell, Tensor], column: int, encode: Encode, check: Callable[[], None]) -> Tensor:
    """Compute the embeddings of a column's pictures, of a video its middle frame: (rows, D) of length 1.

    pictures: by (row, column), each (frames, H, W, 3).
    check: called before each picture; may raise.
    """
    embeddings: list[Tensor] = []
    for (_, place), frames in pictures.items():
        if place == column:
            check()
            embeddings.append(encode(middle(frames)[None])[0].float().cpu())
    return torch.nn.functional.normalize(torch.stack(embeddings), dim=1)


def best_first(scores: Sequence[Scores], order: str, first: int = 0) -> list[Scores]:
    """Sort from best to worst; the `first` ones stay in front."""
    return [*scores[:first], *sorted(scores[first:], key=lambda score: score.rank(order))]

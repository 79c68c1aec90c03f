"""How a run is measured on pictures that it is not trained on."""

from dataclasses import dataclass, fields
from typing import Any

from ..common.text import finite, within
from ..data.samples import TrainingData

MOST_HELD_OUT = 0.9


@dataclass(frozen=True)
class ValidationOptions:
    """What is held out of training and how often the loss is taken on it (TESSERA_VALIDATION).

    part: of the data's pictures, held out by a draw of `seed`; not read where `data` brings pictures of its own.
    every_n_steps: optimizer steps between two measurements; `at_start` adds one before the first, the last step always
    has one. keep_best: whether the LoRA with the least loss is kept as a file. min_sigma, max_sigma: the noise levels
    measured at are the nine deciles between them.
    """

    part: float = 0.1
    every_n_steps: int = 100
    at_start: bool = True
    keep_best: bool = True
    seed: int = 0
    min_sigma: float = 0.0
    max_sigma: float = 1.0
    data: TrainingData | None = None

    def __post_init__(self) -> None:
        finite(self)
        within("part", self.part, 0.0, MOST_HELD_OUT)
        if self.part == 0 and self.data is None:
            raise ValueError("part is 0 and data is not connected, so nothing is held out; set part above 0 (0.1).")
        if self.every_n_steps < 1:
            raise ValueError(f"every_n_steps is {self.every_n_steps}; set it to 1 or more.")
        if not 0 <= self.min_sigma < self.max_sigma <= 1:
            raise ValueError(
                f"min_sigma is {self.min_sigma} and max_sigma {self.max_sigma}; min_sigma must be the smaller one, "
                "both between 0 and 1."
            )

    def facts(self) -> dict[str, Any]:
        """The options as plain values, the data by its fingerprint."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain if self.data is None else plain | {"part": 0.0, "data": self.data.fingerprint}

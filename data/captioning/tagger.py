"""Tags of a WD tagger: an ONNX model with a table of its tags, run by the package onnxruntime."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ...common.fingerprint import fingerprint
from ...common.untrusted.budgets import TAG_TABLE, check_size
from ...common.untrusted.regular_files import file_state, open_regular, read_regular
from .instruction import CaptionStyle

TABLE = "selected_tags.csv"
_GENERAL, _CHARACTER = "0", "4"  # categories; 9 is the rating, which is no tag
_CHARACTER_THRESHOLD = 0.85  # names are wrong more often than things
_SIDE = 448  # of models that state none
# Those that start at once: TensorRT would first build an engine for minutes.
_PROVIDERS = ("CUDAExecutionProvider", "ROCMExecutionProvider", "DmlExecutionProvider", "CPUExecutionProvider")


@dataclass(frozen=True)
class Tag:
    """One tag of a table.

    name: as captions have it.
    character: it is the name of a character.
    rating: it is no tag but a rating.
    """

    name: str
    character: bool
    rating: bool


class Tagger:
    """A tagger with its table.

    side: of the square picture that it takes, in pixels.
    """

    def __init__(self, model: Path, style: CaptionStyle, threshold: float):
        """threshold: least probability of a tag; those of characters need 0.85 or more.

        Raises ValueError if the package, the model or its table is missing or can't be read.
        """
        self.model = model
        self.style = style
        self.threshold = threshold
        self.tags = read_table(_table_of(model))
        self._session = _session(model)
        self._input = self._session.get_inputs()[0]
        shape = list(self._input.shape)
        if len(shape) != 4 or shape[3] != 3:
            raise ValueError(
                f"tagger {model.name!r} takes pictures in another form than WD taggers do; choose one of those, such "
                "as wd-eva02-large-tagger-v3."
            )
        self.side = shape[1] if isinstance(shape[1], int) and 0 < shape[1] <= 4096 else _SIDE

    def key(self) -> str:
        """Fingerprint the model and all settings that tags depend on."""
        rules = (self.style.max_words, self.style.never_use, self.style.trigger, self.threshold)
        return fingerprint("tagger 1", _digest(self.model, file_state(self.model)), [t.name for t in self.tags], rules)

    def caption(self, image: Tensor) -> str:
        """Write the tags of a picture (1, H, W, 3) in 0 to 1 whose longer side is `side`."""
        pixels = _square(image[0].numpy(), self.side)
        (values,) = self._session.run([self._session.get_outputs()[0].name], {self._input.name: pixels})[0]
        if len(values) != len(self.tags):
            raise ValueError(
                f"tagger {self.model.name!r} knows {len(values)} tags, but its table has {len(self.tags)}; download "
                "both files again."
            )
        return self.style.tags(chosen_tags(self.tags, _probabilities(values), self.threshold))

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) at which the model sees a picture: `side` at the longer one."""
        scale = self.side / max(height, width)
        return max(1, round(height * scale)), max(1, round(width * scale))


def read_table(path: Path) -> tuple[Tag, ...]:
    """Read the tags of a table with the columns name and category. Raises ValueError if it isn't readable."""
    try:
        text = read_regular(path, TAG_TABLE).decode("utf-8-sig")
        rows = list(csv.DictReader(io.StringIO(text)))
        check_size(TAG_TABLE, path.name, items=len(rows))
        return tuple(
            Tag(_spaced(row["name"]), row["category"] == _CHARACTER, row["category"] not in (_GENERAL, _CHARACTER))
            for row in rows
        )
    except OSError as error:
        raise ValueError(
            f"tagger has no table of its tags: put {path.name} of the same download beside the model."
        ) from error
    except (UnicodeDecodeError, csv.Error, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"The table {path.name!r} of the tagger has no columns name and category; download it again."
        ) from error


def chosen_tags(tags: Sequence[Tag], probabilities: Sequence[float], threshold: float) -> list[str]:
    """List the likely tags: those of characters first, then the others, the likeliest first."""
    rows = sorted(zip(tags, probabilities, strict=True), key=lambda row: (not row[0].character, -row[1]))
    return [
        tag.name
        for tag, value in rows
        if not tag.rating and value >= (max(threshold, _CHARACTER_THRESHOLD) if tag.character else threshold)
    ]


def _spaced(name: str) -> str:
    """Write a tag as prompts have it: spaces for underscores, but not in faces such as ^_^."""
    return name.replace("_", " ") if len(name) > 3 else name


def _probabilities(values: np.ndarray) -> list[float]:
    """Return values from 0 to 1: some models give logits."""
    values = values.astype(np.float64)
    if values.min() < 0 or values.max() > 1:
        values = 1 / (1 + np.exp(-values))
    return [float(value) for value in values]


def _square(pixels: np.ndarray, side: int) -> np.ndarray:
    """Put a picture (H, W, 3) in the middle of a white square: (1, side, side, 3) in BGR, 0 to 255."""
    height, width = pixels.shape[:2]
    canvas = np.full((side, side, 3), 255, np.float32)
    top, left = (side - height) // 2, (side - width) // 2
    canvas[top : top + height, left : left + width] = pixels * 255
    return np.ascontiguousarray(canvas[None, :, :, ::-1])


def _table_of(model: Path) -> Path:
    """Return the place of a model's table: of the model's own name, or the name that WD taggers have."""
    own = model.with_suffix(".csv")
    return own if own.is_file() else model.with_name(TABLE)


def _session(model: Path) -> Any:
    try:
        runtime = import_module("onnxruntime")
    except ImportError as error:
        raise ValueError(
            "tagger needs the package onnxruntime; run `pip install onnxruntime` in ComfyUI's Python and restart "
            "ComfyUI, or set tagger to none and connect clip."
        ) from error
    providers = [name for name in _PROVIDERS if name in runtime.get_available_providers()]
    try:
        with open_regular(model):
            return runtime.InferenceSession(str(model), providers=providers)
    except Exception as error:  # its own kinds, one for each way in which a file may be damaged
        raise ValueError(f"tagger {model.name!r} can't be loaded ({error}); download it again.") from error


@lru_cache(maxsize=16)
def _digest(model: Path, state: tuple[int, ...]) -> str:
    digest = blake2b(digest_size=20)
    with open_regular(model) as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()

"""Preview files of a run and the contact sheet over its steps.

The folder `previews` in the run's folder holds images (`step000100_0.png`), videos (`.webp`), the contact sheet
`sheet.png` and the index `previews.json` with the settings of each file.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comfy.cli_args import args
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from ...common.files import write_atomically
from ...common.untrusted.budgets import PREVIEW_INDEX
from ...common.untrusted.json_text import read_json
from .contact_sheet import middle, render_sheet, spread, to_picture

FOLDER = "previews"
SHEET = "sheet.png"
INDEX = "previews.json"
MOST_COLUMNS = 24
_CELL = 384


@dataclass(frozen=True)
class Shot:
    """Preview image or video.

    step: optimizer step it was made at.
    row: row on the sheet.
    title: title of the row.
    settings: seed and sampling settings.
    frames: number of frames, 1 for an image.
    """

    step: int
    row: int
    title: str
    settings: dict[str, Any]
    frames: int = 1

    @property
    def file(self) -> str:
        """File name in the folder of previews."""
        return f"step{self.step:06d}_{self.row}.{'png' if self.frames == 1 else 'webp'}"

    def same_row(self, other: "Shot") -> bool:
        """Return True if the other shot has the same row, title and settings, so that one replaces the other."""
        return self._place() == other._place()

    def _place(self) -> tuple[Any, ...]:
        return self.row, self.title, self.settings


def save_shot(folder: Path, shot: Shot, frames: Tensor, fps: float) -> Path:
    """Save an image as PNG or a video as animated WEBP, with its settings as metadata. Returns its path.

    frames: (frames, H, W, 3), 0 to 1.

    ComfyUI's --disable-metadata leaves the metadata out.
    """
    path, pictures = folder / shot.file, [to_picture(frame) for frame in frames]
    said = "" if args.disable_metadata else json.dumps(asdict(shot), allow_nan=False)

    def write(temporary: Path) -> None:
        if shot.frames == 1:
            metadata = PngInfo()
            if said:
                metadata.add_text("tessera", said)
            pictures[0].save(temporary, "PNG", pnginfo=metadata, compress_level=4)
        else:
            pictures[0].save(
                temporary,
                "WEBP",
                save_all=True,
                append_images=pictures[1:],
                duration=round(1000 / fps),
                loop=0,
                quality=90,
                xmp=said.encode(),
            )

    write_atomically(path, write)
    return path


def previews_folder(run: Path) -> Path | None:
    """Return the folder of a run's previews; None if there is none, or it is a link."""
    folder = run / FOLDER
    try:
        real = folder.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle, before Python 3.13
        return None
    return folder if real.is_dir() and real == run.resolve() / FOLDER else None


def read_index(folder: Path) -> list[Shot]:
    """Read the shots of an earlier session whose files exist; empty if the index cannot be read."""
    try:
        entries = read_json(folder / INDEX, PREVIEW_INDEX)
        shots = [Shot(int(s["step"]), int(s["row"]), s["title"], s["settings"], int(s["frames"])) for s in entries]
        return [shot for shot in shots if (folder / shot.file).is_file()]
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return []


def write_index(folder: Path, shots: Sequence[Shot]) -> None:
    """Write the index of the shots."""
    text = json.dumps([asdict(shot) for shot in shots], indent=1, allow_nan=False)

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(folder / INDEX, write)


def write_sheet(folder: Path, shots: Sequence[Shot], rows: Sequence[str], texts: Mapping[str, str]) -> Path:
    """Write the contact sheet, with a row per prompt and seed and a column per step. Returns its path.

    Of more than MOST_COLUMNS steps, evenly spaced ones from first to last are shown.

    texts: text chunks of the PNG, by keyword.
    """
    steps = spread(sorted({shot.step for shot in shots}), MOST_COLUMNS)
    cells = {}
    for shot in shots:
        if shot.step in steps:
            with Image.open(folder / shot.file, formats=["PNG", "WEBP"]) as opened:
                opened.seek(shot.frames // 2 if shot.frames > 1 else 0)
                picture = opened.convert("RGB")
            picture.thumbnail((_CELL, _CELL))
            cells[shot.row, steps.index(shot.step)] = picture
    sheet = render_sheet(rows, [f"step {step}" for step in steps], cells)
    path = folder / SHEET
    metadata = PngInfo()
    for key, text in texts.items():
        metadata.add_text(key, text)
    write_atomically(path, lambda temporary: sheet.save(temporary, "PNG", pnginfo=metadata))
    return path


__all__ = [
    "FOLDER",
    "INDEX",
    "SHEET",
    "Shot",
    "middle",
    "previews_folder",
    "read_index",
    "save_shot",
    "write_index",
    "write_sheet",
]

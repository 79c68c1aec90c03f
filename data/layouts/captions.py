"""Caption of a file: a text beside it, or a text of a list."""

import codecs
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...common.text import quoted
from ...common.untrusted.budgets import CAPTION_FILE, CAPTION_JSON, OverBudget
from ...common.untrusted.json_text import read_json
from ...common.untrusted.regular_files import file_state, read_regular
from ..media.images import EXTENSIONS
from .files import VIDEO_EXTENSIONS, stem_of

# By byte order mark; that of UTF-32 begins with that of UTF-16.
_ENCODINGS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
DEFAULT_EXTENSION = ".txt"
# Names of a caption in JSON and tables, in the order in which they are looked for.
TEXT_FIELDS = ("text", "caption", "prompt", "description")
TAG_FIELDS = ("tags", "tag_string")
# The parts of a structured caption of AnimaLoraToolkit, in its order.
_PARTS = (
    ("fixed", "quality"),
    ("ai_output", "count"),
    ("character", "name"),
    ("fixed", "series"),
    ("fixed", "artist"),
    ("from_path", "appearance"),
    ("ai_output", "appearance"),
    ("ai_output", "tags"),
    ("ai_output", "environment"),
    ("ai_output", "nl"),
)


@dataclass(frozen=True)
class CaptionSource:
    """Place of a caption.

    file: file that holds it alone; None for a text.
    text: the caption itself, from a list or the name of a folder.
    list: file of the list that it comes from.
    per_line: each line of the text is a caption of its own.
    """

    file: Path | None = None
    text: str = ""
    list: Path | None = None
    per_line: bool = False

    def read(self) -> str:
        """Return the caption. Raises ValueError if its file isn't readable."""
        if self.file is None:
            return self.text
        if self.file.suffix.lower() == ".json":
            return json_caption(self.file) or ""
        return read_text(self.file)


def caption_file(picture: Path, extension: str) -> Path:
    """Return the path at which the caption of an image is expected."""
    return picture.with_name(picture.stem + extension)


def checked_extension(extension: str) -> str:
    """Normalise the extension of caption files to one leading dot; raises ValueError for those of images and videos."""
    normal = "." + extension.strip().lstrip(".")
    if not re.fullmatch(r"\.[\w.-]+", normal) or normal.lower() in EXTENSIONS | VIDEO_EXTENSIONS:
        raise ValueError(f"caption_extension is {quoted(extension)}; set it to how caption files end, such as .txt.")
    return normal


def read_text(file: Path) -> str:
    """Read a caption file: UTF-8, or what the byte order mark says. Raises ValueError if it isn't readable."""
    try:
        return decoded(read_regular(file, CAPTION_FILE))
    except OverBudget as error:
        size, limit = file.stat().st_size / 1e6, CAPTION_FILE.bytes / 1e6
        raise ValueError(
            f"The caption file {file.name!r} has {size:.1f} MB, too much for a caption; shorten it to at most "
            f"{limit:.0f} MB."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"The caption file {file.name!r} is not UTF-8 text; save it as UTF-8.") from error
    except OSError as error:
        raise unreadable("caption file", file, error) from error


def unreadable(kind: str, file: Path, error: OSError) -> ValueError:
    """Make the error for a file that the system doesn't let us read. kind: its name for the user."""
    return ValueError(f"The {kind} {file.name!r} can't be read ({error.strerror or error}); check its access rights.")


def decoded(data: bytes) -> str:
    """Decode a text by its byte order mark, as UTF-8 without one. Raises UnicodeDecodeError."""
    encoding = next((name for mark, name in _ENCODINGS.items() if data.startswith(mark)), "utf-8")
    return data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def json_caption(file: Path) -> str | None:
    """Read the caption in a JSON file beside a picture; None if it holds none that is known, or isn't JSON."""
    try:
        return _json_caption(file, file_state(file))
    except OSError:
        return None


@lru_cache(maxsize=1024)
def _json_caption(file: Path, state: tuple[int, ...]) -> str | None:
    try:
        caption = caption_in(read_json(file, CAPTION_JSON))
    except (ValueError, OSError):
        return None
    return caption and caption[: CAPTION_FILE.characters + 1]  # the cache keeps no more; it is refused when it is used


def caption_in(value: Any) -> str | None:
    """Find the caption in a JSON value: a text, a list of tags, or an object with one of the known names."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(value) if value and all(isinstance(tag, str) for tag in value) else None
    if not isinstance(value, dict):
        return None
    text = next((value[name] for name in TEXT_FIELDS if isinstance(value.get(name), str)), None)
    tags = next((caption_in(value[name]) for name in TAG_FIELDS if value.get(name)), None)
    if text is None and tags is None:
        return _structured_caption(value)
    return ", ".join(filter(None, (text, tags)))  # sd-scripts appends the tags of its metadata to the caption


def _structured_caption(value: Mapping[str, Any]) -> str | None:
    """Join the parts of a caption of AnimaLoraToolkit; None if there are none."""
    sections = [(value.get(section), name) for section, name in _PARTS]
    parts = [caption_in(section[name]) for section, name in sections if isinstance(section, dict) and name in section]
    return ", ".join(filter(None, parts)) or None


class CaptionFiles:
    """Captions beside the files of a folder, found by name.

    `a.jpg` takes `a.txt`, or one whose name differs in the case of its extension or in composed letters (NFC, NFD).
    With the default extension it takes `a.caption`, `a.jpg.txt` or `a.json` where there is no other.
    """

    def __init__(self, files: Iterable[Path], extension: str):
        """files: all files of the folder. extension: of captions, with the dot."""
        self.extension = extension
        self._files = {_key(file): file for file in files}
        self._other = () if extension != DEFAULT_EXTENSION else (".caption",)
        self._with_json = bool(self._other)
        self._sources: dict[Path, CaptionSource | None] = {}

    def find(self, picture: Path) -> CaptionSource | None:
        """Find the caption of a file. The answer stays the same, however often it is asked for."""
        if picture not in self._sources:
            self._sources[picture] = self._find(picture)
        return self._sources[picture]

    def _find(self, picture: Path) -> CaptionSource | None:
        if (file := caption_file(picture, self.extension)).is_file():
            return CaptionSource(file)
        for name in self._names(picture):
            match = self._files.get(_key(picture.with_name(name)))
            if match is not None and match != picture:
                return CaptionSource(match)
        if not self._with_json:
            return None
        match = self._files.get(_key(picture.with_name(picture.stem + ".json")))
        return CaptionSource(match) if match is not None and json_caption(match) is not None else None

    def _names(self, picture: Path) -> list[str]:
        """List the names that the caption of a picture may have, the first choice first."""
        extensions = (self.extension, *self._other)
        names = [picture.stem + extension for extension in extensions]
        return names + [picture.name + extension for extension in extensions] if self._with_json else names

    def usual(self, picture: Path, caption: Path) -> bool:
        """Return True if a caption file has the usual name of a picture's."""
        return stem_of(caption.name) == stem_of(picture.name) and caption.suffix == self.extension


def _key(file: Path) -> tuple[str, str, str]:
    """Key of a file name: its folder, and its stem in composed letters, and its extension in lower case."""
    return unicodedata.normalize("NFC", str(file.parent)), stem_of(file.name), file.suffix.lower()


def text_files(files: Sequence[Path], extension: str) -> list[Path]:
    """List the files that may be captions: those with the extension, and those with one of the others."""
    endings = {extension.lower()} | ({".caption"} if extension == DEFAULT_EXTENSION else set())
    return [file for file in files if file.suffix.lower() in endings]

"""Caption files of a folder: one text next to each image or video."""

import codecs
import re
from collections.abc import Sequence
from pathlib import Path

from ...common.progress import Interrupted
from ...common.text import quoted
from ...common.untrusted.budgets import CAPTION_FILE, CAPTION_FORMS, OverBudget, check_size
from ...common.untrusted.regular_files import read_regular
from ..captions.options import CaptionOptions
from ..captions.variants import CaptionVariants, make_caption_variants
from ..media.images import EXTENSIONS
from .files import VIDEO_EXTENSIONS, list_files, relative_name

# By byte order mark; that of UTF-32 begins with that of UTF-16.
_ENCODINGS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def caption_file(picture: Path, extension: str) -> Path:
    """Return the path at which the caption of an image is expected."""
    return picture.with_name(picture.stem + extension)


def checked_extension(extension: str) -> str:
    """Normalise the extension of caption files to one leading dot; raises ValueError for those of images and videos."""
    normal = "." + extension.strip().lstrip(".")
    if not re.fullmatch(r"\.[\w.-]+", normal) or normal.lower() in EXTENSIONS | VIDEO_EXTENSIONS:
        raise ValueError(f"caption_extension is {quoted(extension)}; set it to how caption files end, such as .txt.")
    return normal


def read_caption(picture: Path, extension: str) -> str:
    """Read the caption of an image: UTF-8, or what the byte order mark says. Raises ValueError if it isn't readable."""
    file = caption_file(picture, extension)
    try:
        data = read_regular(file, CAPTION_FILE)
        encoding = next((name for mark, name in _ENCODINGS.items() if data.startswith(mark)), "utf-8")
        return data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    except OverBudget as error:
        size, limit = file.stat().st_size / 1e6, CAPTION_FILE.bytes / 1e6
        raise ValueError(
            f"The caption file {file.name!r} has {size:.1f} MB, too much for a caption; shorten it to at most "
            f"{limit:.0f} MB."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"The caption file {file.name!r} is not UTF-8 text; save it as UTF-8.") from error
    except OSError as error:
        fix = "check its access rights"
        raise ValueError(f"The caption file {file.name!r} can't be read ({error.strerror or error}); {fix}.") from error


def check_captions_exist(folder: Path, files: Sequence[Path], extension: str, noun: str) -> None:
    """Raise ValueError for files without a caption file."""
    missing = [file for file in files if not caption_file(file, extension).is_file()]
    if missing:
        raise ValueError(_missing_captions(folder, files, missing, extension, noun))


def scan_captions(
    folder: Path,
    files: Sequence[Path],
    extension: str,
    options: CaptionOptions,
    trigger_words: str,
    interrupted: Interrupted,
) -> tuple[list[str], dict[str, CaptionVariants]]:
    """Read the captions of a folder's files.

    interrupted: called before each file; raises to stop.
    Returns the contents of the caption files, and the caption variants by file name, in the same order.
    Raises ValueError for captions past their budgets, and as `make_caption_variants` does.
    """
    texts: list[str] = []
    variants: dict[str, CaptionVariants] = {}
    characters = 0
    for file in files:
        interrupted()
        name = relative_name(folder, file)
        texts.append(read_caption(file, extension))
        caption_name = relative_name(folder, caption_file(file, extension))
        caption_variants = make_caption_variants(texts[-1], options, trigger_words, caption_name)
        if (longest := max(map(len, caption_variants.texts))) > CAPTION_FILE.characters:
            raise ValueError(
                f"The caption of {name!r} has {longest} characters with its trigger_words, but text encoders read only "
                f"a few thousand; shorten it to at most {CAPTION_FILE.characters}."
            )
        characters += sum(map(len, caption_variants.texts))
        check_size(CAPTION_FORMS, f"The folder {folder.name!r}", characters=characters)
        variants[name] = caption_variants
    return texts, variants


def _missing_captions(folder: Path, files: Sequence[Path], missing: Sequence[Path], extension: str, noun: str) -> str:
    """Message for images without caption files."""
    example = f"such as {caption_file(missing[0], extension).name!r} for {missing[0].name!r}"
    if len(missing) == len(files):
        return (
            f"The folder {folder.name!r} holds {noun}s ({len(files)}) but no {extension} caption files; put a text "
            f"file with the same name next to each {noun}, {example} (an empty file means an empty caption)."
        )
    return (
        f"{len(missing)} of {len(files)} {noun}s in {folder.name!r} have no {extension} caption file: "
        f"{list_files(folder, missing)}; add one next to each, {example} (an empty file means an empty caption), or "
        f"take the {noun} out of the folder."
    )

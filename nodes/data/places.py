"""Places that the files of a folder may come from: allowed folders, and archives that were unpacked."""

import os
from pathlib import Path

from comfy.model_management import processing_interrupted, throw_exception_if_processing_interrupted

from ...data.folders.dataset import Places, folder_fingerprint
from ...data.layouts.archives import Unpacked, opened, unpack
from ...data.layouts.kinds import IMAGES, FileKind
from ..common.folder_access import is_allowed_file, may_write_beside, resolve_folder, unpacking_folder
from .image_inputs import NONE


def read_places(layout: str) -> Places:
    """Make the places of a folder that is read for training: its archives are unpacked."""
    return Places(layout, is_allowed_file, _unpack)


def shown_places(layout: str) -> Places:
    """Make the places of a folder that is only looked at: of its archives, those that were unpacked before."""
    return Places(layout, is_allowed_file, lambda archive: opened(archive, unpacking_folder()))


def fingerprint_places(layout: str) -> Places:
    """Make the places of a folder whose state is asked for: archives count as files."""
    return Places(layout, is_allowed_file)


def stop_if_cancelled() -> None:
    """Raise ValueError once the user cancels, and leave the request to ComfyUI, which ends before the next node."""
    if processing_interrupted():
        raise ValueError("Cancelled.")


def fingerprint_of_folder(
    folder: str | None,
    caption_extension: str | None,
    layout: str | None,
    kind: FileKind = IMAGES,
    **other_folders: str | None,
) -> object:
    """Fingerprint the folder that a node reads, for its `fingerprint_inputs`. A linked input has no value yet and
    counts as changed. What is wrong with a folder is returned as text; `execute` raises it.

    other_folders: control_folder and mask_folder, by name.
    """
    if folder is None or caption_extension is None or layout is None or None in other_folders.values():
        return float("nan")
    try:
        return folder_fingerprint(
            resolve_folder(folder),
            caption_extension,
            kind,
            places=fingerprint_places(layout),
            interrupted=stop_if_cancelled,
            **{name: other_folder(other) for name, other in other_folders.items()},
        )
    except ValueError as error:
        return str(error)


def folder_or_none(folder: str | None) -> str | None:
    """Return the choice of a folder that need not be chosen; None without one."""
    return None if folder in (None, "", NONE) else folder


def other_folder(folder: str | None) -> Path | None:
    """Resolve a folder that need not be chosen. Raises ValueError as `resolve_folder` does."""
    choice = folder_or_none(folder)
    return None if choice is None else resolve_folder(choice)


def is_unpacked(file: Path) -> bool:
    """Return True for a file of an archive that was unpacked; links are followed."""
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(unpacking_folder()))


def may_write_caption(file: Path) -> bool:
    """Return True for a caption that may be written: not beside pictures of an archive or of a foreign folder."""
    return may_write_beside(file) and not is_unpacked(file)


def _unpack(archive: Path) -> Unpacked:
    if not is_allowed_file(archive):
        raise ValueError(f"The archive {archive.name!r} is a link to a place outside the allowed folders.")
    return unpack(archive, unpacking_folder(), throw_exception_if_processing_interrupted)

"""Places that the files of a folder may come from: allowed folders, and archives that were unpacked."""

import os
from pathlib import Path

from comfy.model_management import processing_interrupted, throw_exception_if_processing_interrupted

from ...data.folders.dataset import Places
from ...data.layouts.archives import Unpacked, opened, unpack
from ..common.folder_access import is_allowed_file, may_write_beside, unpacking_folder


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

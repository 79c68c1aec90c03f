"""Places that masks are saved to: inside ComfyUI's input folder only."""

import os
from pathlib import Path

import folder_paths


def place_in_input(place: Path) -> tuple[Path, str]:
    """Return the real path of a mask's file, existing or not, and its path below ComfyUI's input folder.

    Raises ValueError for a place outside of it, and for a link.
    """
    root = Path(os.path.realpath(folder_paths.get_input_directory()))
    real = Path(os.path.realpath(place.parent)) / place.name
    if not real.is_relative_to(root) or real.is_symlink():
        raise ValueError(
            "Masks are saved only inside ComfyUI's input folder; move the folder there, or choose a mask_folder there."
        )
    return real, real.relative_to(root).as_posix()

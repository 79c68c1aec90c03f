"""Allow-list of folders that a workflow may read: ComfyUI's own, and those of the user's settings file."""

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import folder_paths

from ...common.text import quoted
from ...data.layouts.archives import is_archive
from ...data.layouts.files import is_image, is_skipped, is_video

SETTINGS_FILE = "tessera.json"
# The folders are listed at each request of the node definitions; a network drive or a whole disk must not delay it.
LISTED_LEVELS = 6
MOST_WALKED = 5000  # folders per root
LIST_SECONDS = 10.0
# The pack's own pictures, read as examples/…. ComfyUI would look for workflows in a folder of that name.
EXAMPLES = Path(__file__).resolve().parents[2] / "pictures"
TRY_IT = "examples/try_it"

logger = logging.getLogger(__name__)


class AbsentFolder(ValueError):
    """A folder that may be read, but does not exist."""


@dataclass(frozen=True)
class FolderSettings:
    """The user's settings.

    allowed_folders: absolute folders that workflows may read images from, subfolders included.
    delete_runs: runs may be deleted from the browser on a server that other machines can reach too.
    hosts: names of tunnels and proxies whose pages may control a run, in lower case.
    """

    allowed_folders: tuple[Path, ...] = ()
    delete_runs: bool = False
    hosts: tuple[str, ...] = ()


def read_settings() -> FolderSettings:
    """Read `tessera.json` in ComfyUI's user folder, such as {"allowed_folders": ["/photos/training"]}.

    No file means no settings. Raises ValueError if the file is broken.
    """
    path = Path(folder_paths.get_user_directory(), SETTINGS_FILE)
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return FolderSettings()
    except (OSError, ValueError) as error:
        raise ValueError(f"{_place()} can't be read as JSON ({error}); fix it or delete it.") from error
    folders = content.get("allowed_folders", []) if isinstance(content, dict) else None
    if not isinstance(folders, list) or not all(isinstance(f, str) and os.path.isabs(f) for f in folders):
        raise ValueError(
            f'{_place()} has no list of absolute folders under "allowed_folders"; write it as '
            f'{{"allowed_folders": ["/photos/training"]}}.'
        )
    delete_runs = content.get("delete_runs", False)
    if not isinstance(delete_runs, bool):
        raise ValueError(f'{_place()} has {quoted(delete_runs)} under "delete_runs"; write true or false.')
    hosts = content.get("hosts", [])
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise ValueError(
            f'{_place()} has {quoted(hosts)} under "hosts"; write a list of names, such as {{"hosts": ["my.example"]}}.'
        )
    return FolderSettings(tuple(Path(f) for f in folders), delete_runs, tuple(host.lower() for host in hosts))


def cache_folder() -> Path:
    """Return the folder of the latent and caption cache."""
    return Path(folder_paths.get_user_directory(), "tessera", "cache")


def unpacking_folder() -> Path:
    """Return the folder of the files of unpacked archives."""
    return Path(folder_paths.get_user_directory(), "tessera", "unpacked")


def captions_folder() -> Path:
    """Return the folder of the records of captions that models wrote."""
    return Path(folder_paths.get_user_directory(), "tessera", "captions")


def check_readable(folders: Mapping[str, str | None]) -> bool | str:
    """Check folders by input name. Returns True, or the error that ComfyUI shows.

    None is a linked folder, which execute checks, or a missing one, which ComfyUI reports.
    """
    for name, folder in folders.items():
        try:
            if folder is not None:
                resolve_folder(folder)
        except ValueError as error:
            return f"{name}: {error}"
    return True


def list_image_folders() -> list[str]:
    """List the folders that `resolve_folder` accepts and that hold images, directly or in subfolders.

    Folders more than six levels below their root, or after the first 5000 folders of a root, are left out
    (`resolve_folder` accepts them nevertheless). The list is refreshed at most every ten seconds, and when the settings
    change.
    """
    return list(_lists().images)


def list_video_folders() -> list[str]:
    """List the folders that hold video files, as `list_image_folders` does."""
    return list(_lists().videos)


@dataclass(frozen=True)
class _Lists:
    """Folders that the nodes list, as `resolve_folder` accepts them.

    images: folders with image files.
    videos: folders with video files.
    """

    images: list[str]
    videos: list[str]


def _lists() -> _Lists:
    roots = _own_roots()
    try:
        allowed = read_settings().allowed_folders
    except ValueError as error:
        logger.warning("%s", error)
        allowed = ()
    key = (tuple(sorted((name, tuple(folders)) for name, folders in roots.items())), allowed)
    cached = _listed.get(key)
    if cached is None or time.monotonic() - cached[0] > LIST_SECONDS:
        lists = _list_folders(roots, allowed)  # which may take longer than LIST_SECONDS
        cached = time.monotonic(), lists
        _listed.clear()
        _listed[key] = cached
    return cached[1]


_listed: dict[Any, tuple[float, _Lists]] = {}


def _list_folders(own_roots: dict[str, list[Path]], allowed: tuple[Path, ...]) -> _Lists:
    inside = {(name, root): _folders_with_files(root) for name, roots in own_roots.items() for root in roots}
    outside = {root: _folders_with_files(root) for root in allowed}

    def listed(kind: int) -> list[str]:
        own_folders = {
            f"{name}/{subfolder}"
            for (name, _), folders in inside.items()
            for subfolder in folders[kind]
            if subfolder != "."
        }
        allowed_folders = {
            (root / subfolder).as_posix() for root, folders in outside.items() for subfolder in folders[kind]
        }
        return sorted(own_folders) + sorted(allowed_folders)

    return _Lists(listed(0), listed(1))


def resolve_folder(choice: str) -> Path:
    """Resolve a folder named by a workflow: `input/…`, `datasets/…`, the pack's own `examples/…`, or an absolute path
    that the settings allow.

    Links are followed before the check. Raises ValueError for any other folder, existing or not, and AbsentFolder for
    one of these that does not exist.
    """
    if not isinstance(choice, str):
        raise ValueError(f"The folder is {quoted(choice)}, which is not text; choose one from the list.")
    if os.path.isabs(choice):
        own_roots = [root for roots in _readable_roots().values() for root in roots]
        roots = (*read_settings().allowed_folders, *(root for root in own_roots if root != Path(choice)))
        candidates = [(root, Path(choice)) for root in roots if _drive(str(root)) == _drive(choice)]
    else:
        name, _, subpath = choice.replace("\\", "/").partition("/")
        roots = () if _leaves_its_root(subpath) else tuple(_readable_roots().get(name, []))
        candidates = [(root, root / subpath) for root in roots if subpath]
    inside = [folder for root, folder in candidates if _is_within(folder, root)]
    if not inside:
        raise ValueError(
            f"The folder {quoted(choice)} can't be used, because it isn't inside ComfyUI's input or datasets folder; "
            f'move it there (and choose input/… or datasets/…) or add it to "allowed_folders" in {_place()}.'
        )
    for folder in inside:
        if folder.is_dir():
            return folder
    raise AbsentFolder(
        f"The folder {quoted(choice)} does not exist; put your pictures and captions there, or choose another."
    )


def _leaves_its_root(subpath: str) -> bool:
    """Return whether a path would replace the root if joined: a drive (C:x), a root (/x) or a server (//server/share).

    On Windows merely accessing a server's folder identifies the user to it.
    """
    path = PureWindowsPath(subpath)
    return bool(path.drive or path.root)


def _drive(path: str) -> str:
    """Return the drive letter or UNC share on Windows, empty elsewhere."""
    return os.path.normcase(os.path.splitdrive(path)[0])


def _own_roots() -> dict[str, list[Path]]:
    try:
        datasets = folder_paths.get_folder_paths("datasets")
    except KeyError:  # ComfyUI versions without a datasets folder
        datasets = [os.path.join(folder_paths.base_path, "datasets")]
    return {"input": [Path(folder_paths.get_input_directory())], "datasets": [Path(folder) for folder in datasets]}


def _readable_roots() -> dict[str, list[Path]]:
    return _own_roots() | {"examples": [EXAMPLES]}


def _folders_with_files(root: Path) -> tuple[set[str], set[str]]:
    """Walk a root for the folders that hold images and those that hold videos, directly or in subfolders.

    Archives and dataset files count as both. Paths are relative; "." is the root.
    """
    images, videos = set[str](), set[str]()
    for count, (parent, subfolders, names) in enumerate(os.walk(root)):
        if count == MOST_WALKED:
            logger.warning("%s has more than %d folders; the rest are not listed.", root, MOST_WALKED)
            break
        relative = Path(parent).relative_to(root)
        deepest = len(relative.parts) == LISTED_LEVELS
        subfolders[:] = [] if deepest else sorted(name for name in subfolders if not is_skipped(name))
        for holds, folders in ((is_image, images), (is_video, videos)):
            if any(holds(name) or is_archive(name) or name.lower().endswith(".toml") for name in names):
                folders |= {folder.as_posix() for folder in (relative, *relative.parents)}
    return images, videos


def is_allowed_folder(text: str) -> bool:
    """Return whether the user's settings allow this absolute folder, existing or not."""
    if "\n" in text or not os.path.isabs(text):
        return False
    try:
        roots = read_settings().allowed_folders
    except ValueError:
        return False
    return any(_drive(str(root)) == _drive(text) and _is_within(Path(text), root) for root in roots)


def is_allowed_file(file: Path) -> bool:
    """Return whether a file is in a folder that workflows may read; links are followed."""
    roots = [*read_settings().allowed_folders, *(root for folders in _readable_roots().values() for root in folders)]
    return any(_is_within(file, root) for root in roots)


def may_write_beside(file: Path) -> bool:
    """Return whether a caption or a mask may be written here: below ComfyUI's input and datasets folders only.

    Links on the way are followed.
    """
    return any(_is_within(file.parent, root) for roots in _own_roots().values() for root in roots)


def add_to_list(choice: str, *, videos: bool) -> None:
    """Add a folder that has just received files to the list, until the next refresh."""
    listed = _lists().videos if videos else _lists().images
    path = PurePosixPath(choice)
    if choice not in listed and ".." not in path.parts and path.as_posix() == choice:
        listed.append(choice)


def _is_within(folder: Path, root: Path) -> bool:
    try:
        real = os.path.realpath(root)
        return os.path.commonpath((real, os.path.realpath(folder))) == real
    except ValueError:  # another drive, or a NUL in the name
        return False


def _place() -> str:
    return f"the file {SETTINGS_FILE} in ComfyUI's user folder"

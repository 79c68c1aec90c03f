"""Routes with which Training Images and Training Clips show the contents of their folder.

GET `/tessera/folder?kind=pictures&folder=input/foxes&page=0` lists a page with captions and crops. GET
`/tessera/folder/thumbnail?kind=&folder=&file=` returns a small picture of a file, or of a clip's first frame. The
folder must be one that a workflow may read, and the file one that the scan of the folder lists; links are followed
before the check. Both only read. `large=1` asks for a picture to look at instead of a thumbnail.

Lists hold the endings of files that a page may put into the folder: `endings` of those that are listed, `beside` of
captions, masks and archives.
"""

import asyncio
import base64
import binascii
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from ...common.untrusted.in_flight import return_freed_memory
from ...data.captioning.ledger import Ledger
from ...data.folders.pages import FolderPage, PageEntry, read_page
from ...data.layouts.archives import ARCHIVE_ENDINGS, TEXTS
from ...data.layouts.companions import MASK_EXTENSION
from ...data.layouts.files import file_below, file_state, has_ending
from ...data.layouts.kinds import IMAGES, VIDEOS, FileKind
from ...data.layouts.layout import AUTO, LayoutRequest
from ...data.media.thumbnails import LARGE, SIDE, image_thumbnail, video_thumbnail
from ..common.answers import answer, refusal
from ..common.byte_cache import ByteCache
from ..common.folder_access import AbsentFolder, add_to_list, captions_folder, is_allowed_file, resolve_folder
from .crop_frames import crops_of
from .image_inputs import NONE
from .places import is_unpacked, shown_places

MOST_THREADS = 2  # decoding thumbnails at once
MOST_CACHED = 32 << 20  # bytes of thumbnails in memory, about 3000
CACHED_SECONDS = 3600  # in the browser: the address changes with the file

logger = logging.getLogger(__name__)

KINDS = {"pictures": (IMAGES, image_thumbnail), "clips": (VIDEOS, video_thumbnail)}
BESIDE = sorted({*TEXTS, MASK_EXTENSION, *ARCHIVE_ENDINGS})
_thumbnails = ByteCache(MOST_CACHED)


def listed_file(kind: str, folder: str, file: str) -> tuple[Path, str]:
    """Find a file that the list of a folder holds; returns its real path and its name.

    file: id from `file_id`.
    Raises ValueError for a folder that may not be read, and a file not listed there.
    """
    sort, _ = KINDS[kind]
    name = _name(file)
    listed = _outside(name, sort) or file_below(resolve_folder(folder), name, sort.read)
    if listed is None:
        raise ValueError(f"There is no {sort.noun} of this name in the folder any more.")
    if not (is_allowed_file(listed) or is_unpacked(listed)):
        raise ValueError(f"The {sort.noun} is a link to a place outside the folders that may be read.")
    return Path(os.path.realpath(listed)), name


def thumbnail_of(kind: str, folder: str, file: str, side: int = SIDE) -> bytes:
    """Return the thumbnail of a file, as WebP. Raises ValueError as `listed_file` does, and without a picture in it.

    side: longer side in pixels.
    """
    _, make = KINDS[kind]
    path, name = listed_file(kind, folder, file)
    key = (kind, side, str(path), file_state(path))
    data = _thumbnails.find(key)
    if data is None:
        data = make(path, clean(name), side)
        return_freed_memory()
        _thumbnails.put(key, data)
    return data


def _outside(name: str, kind: FileKind) -> Path | None:
    """Find a file that isn't below the folder: of an archive, or of a place that a dataset file names."""
    path = Path(name)
    usable = path.is_absolute() and "\0" not in name and has_ending(path.name, kind.read)
    return path if usable and (is_allowed_file(path) or is_unpacked(path)) and path.is_file() else None


def file_id(path: Path, name: str, folder: Path) -> str:
    """Return the id by which a page asks for a file of a folder. name: its path below the folder, in messages."""
    return _id(name if path == folder / name else str(path))


def _id(name: str) -> str:
    """Encode a file name for a URL; names need not be valid Unicode."""
    return base64.urlsafe_b64encode(os.fsencode(name)).decode()


def _name(id: str) -> str:
    try:
        return os.fsdecode(base64.urlsafe_b64decode(id.encode("ascii")))
    except (UnicodeError, binascii.Error) as error:
        raise ValueError("This isn't a file name; list the folder first.") from error


def clean(text: str) -> str:
    """Replace the invalid characters of names that are not valid Unicode."""
    return text.encode("utf-8", "replace").decode()


def request_of(kind: str, query: Mapping[str, str]) -> LayoutRequest:
    """Make the request for the layout of the folder that a page shows. Raises ValueError for one it may not read."""
    folder = resolve_folder(query.get("folder", ""))
    optional_folders = [query.get(name) for name in ("control_folder", "mask_folder") if kind == "pictures"]
    excluded = [resolve_folder(other) for other in optional_folders if other not in (None, "", NONE)]
    sort, _ = KINDS[kind]
    places = shown_places(query.get("layout") or AUTO)
    return places.request(folder, sort, query.get("caption_extension", ".txt"), excluded)


def _list(kind: str, query: dict[str, str], page: int) -> dict[str, Any]:
    """List a page of a folder, see `read_page`. Raises ValueError as it does."""
    choice = query.get("folder", "")
    layout_request = request_of(kind, query)
    folder = layout_request.folder
    listing = read_page(
        layout_request,
        page,
        missing_only=query.get("missing") == "1",
        may_read=lambda file: is_allowed_file(file) or is_unpacked(file),
        waits=Ledger(captions_folder()).waits,
    )
    if listing.count:
        add_to_list(choice, videos=kind == "clips")
    return _page(listing, folder)


def _page(listing: FolderPage, folder: Path) -> dict[str, Any]:
    entries = [_entry(entry, folder) for entry in listing.entries]
    summary: dict[str, Any] = {"count": listing.count, "missing": listing.missing, "unread": clean(listing.unread)}
    summary["waiting"] = listing.waiting
    summary["notes"] = [clean(note) for note in listing.notes]
    return summary | {"page": listing.page, "pages": listing.pages, "entries": entries}


def _entry(entry: PageEntry, folder: Path) -> dict[str, Any]:
    return {
        "file": file_id(entry.path, entry.name, folder),
        "state": file_state(entry.path),
        "name": clean(entry.name),
        "caption": entry.caption,
        "problem": clean(entry.problem),
        "crops": crops_of(entry.path),
        "masked": entry.masked,
    }


_threads = ThreadPoolExecutor(MOST_THREADS, "tessera-thumbnail")
# Two listings at a time: a folder on a slow drive must not occupy threads that ComfyUI needs.
_listers = ThreadPoolExecutor(2, "tessera-folder")


async def list_folder(request: web.Request) -> web.Response:
    """Answer `/tessera/folder`."""
    query = dict(request.query)
    page = query.get("page", "0")
    if not (page.isascii() and page.isdigit() and len(page) < 9):
        return _refused("page is not a number; give 0 or more.")
    if query.get("kind") not in KINDS:
        return _refused("kind is neither pictures nor clips.")
    # Also for a folder that does not exist yet.
    endings = {"endings": sorted(KINDS[query["kind"]][0].read), "beside": BESIDE}
    loop = asyncio.get_running_loop()
    try:
        listing = await loop.run_in_executor(_listers, _list, query["kind"], query, int(page))
    except ValueError as error:
        return _refused(str(error), **endings, absent=isinstance(error, AbsentFolder))
    except OSError as error:
        return _refused(f"The folder can't be read ({error.strerror}).", **endings)
    return answer(listing | endings, headers=_HEADERS)


async def show_thumbnail(request: web.Request) -> web.Response:
    """Answer `/tessera/folder/thumbnail`."""
    query = request.query
    kind = query.get("kind", "")
    folder = query.get("folder", "")
    file = query.get("file", "")
    if kind not in KINDS:
        return _refused("kind is neither pictures nor clips.")
    loop = asyncio.get_running_loop()
    try:
        side = LARGE if query.get("large") == "1" else SIDE
        data = await loop.run_in_executor(_threads, thumbnail_of, kind, folder, file, side)
    except ValueError as error:
        return _refused(str(error))
    except Exception as error:  # decoders raise many kinds of errors for deliberately broken files
        logger.info("A thumbnail can't be made: %r", error)
        return _refused("The file can't be read.")
    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": f"private, max-age={CACHED_SECONDS}"}
    return web.Response(body=data, content_type="image/webp", headers=headers)


_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


def _refused(sentence: str, **fields: Any) -> web.Response:
    return refusal(sentence, 400, _HEADERS, **fields)


def add_routes(routes: web.RouteTableDef) -> None:
    """Add the routes to those of ComfyUI's server."""
    routes.get("/tessera/folder")(list_folder)
    routes.get("/tessera/folder/thumbnail")(show_thumbnail)

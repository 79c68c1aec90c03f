"""Routes to the files of a run: its previews, and the names of its saves.

GET `/tessera/runs/{id}/previews` lists the previews, `/tessera/runs/{id}/previews/{step}/{row}` gives one of them, and
with `?small=1` a thumbnail. GET `/tessera/runs/{id}/saves` names the LoRAs to compare. A file is named by run, step and
row, never by a path, and links are not followed. GET `/tessera/runs/{id}/workflow` gives the workflow that made a run.
"""

import asyncio
import os
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from aiohttp import web
from PIL import Image

from ...common.untrusted.budgets import PREVIEW, WORKFLOW_FILE
from ...common.untrusted.in_flight import page_pixels, return_freed_memory
from ...common.untrusted.json_text import read_json
from ...train.checkpoint.run_folder import RunFolder
from ...train.checkpoint.run_record import own_file
from ...train.preview.contact_sheet import spread
from ...train.preview.gallery import FOLDER, INDEX, read_index
from ..common.answers import answer, refusal
from ..common.byte_cache import ByteCache
from ..common.saved_workflow import API, WORKFLOW
from .run import runs_folder
from .run_index import text_of
from .run_routes import NO_RUN, known_runs

MOST_LISTED = 2000
MOST_COMPARED = 12  # columns of a grid that is still readable
THUMBNAIL = 192  # pixels of the longer side
MOST_CACHED = 4 << 20  # bytes of thumbnails in memory, a few KB each
TYPES = {".png": "image/png", ".webp": "image/webp"}
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox",
    "Cache-Control": "private, max-age=31536000, immutable",  # the address that a page uses holds the time of the file
}
NO_WORKFLOW = "This run has no workflow: it was queued without one, or ComfyUI runs with --disable-metadata."
GONE = "There is no such preview any more; list those of the run again."

_REDUCIBLE = ("L", "LA", "RGB", "RGBA")  # modes in which neighbours can be averaged
_thumbnails = ByteCache(MOST_CACHED)


def previews_folder(run: Path) -> Path | None:
    """Folder of a run's previews; None where there is none, or it is a link."""
    folder = run / FOLDER
    try:
        real = folder.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle, before Python 3.13
        return None
    return folder if real.is_dir() and real == run.resolve() / FOLDER else None


def listed_previews(run: Path, most: int = MOST_LISTED) -> list[dict[str, Any]]:
    """List the newest previews of a run, by step and row; `changed` tells a file from one made anew."""
    folder = previews_folder(run)
    index = folder and own_file(folder, INDEX)
    if folder is None or index is None:
        return []
    found = []
    for shot in sorted(read_index(folder), key=lambda shot: (shot.step, shot.row))[-most:]:
        if (path := own_file(folder, shot.file)) is not None:
            changed = f"{path.stat().st_mtime_ns:x}"
            found.append({"step": shot.step, "row": shot.row, "title": text_of(shot.title), "changed": changed})
    return found


def read_preview(run: Path, step: int, row: int, small: bool) -> tuple[bytes, str] | None:
    """Read a preview, or make its thumbnail. Returns the bytes and their content type; None where there is none."""
    folder = previews_folder(run)
    if folder is None:
        return None
    named = (own_file(folder, f"step{step:06d}_{row}{ending}") for ending in TYPES)
    path = next((path for path in named if path is not None), None)
    if path is None:
        return None
    # A link that took the file's place meanwhile is refused as well, where the system can.
    how = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, how), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_size > PREVIEW.bytes:
            return None
        key = path, status.st_mtime_ns, status.st_size
        if small and (made := _thumbnails.find(key)) is not None:
            return made, "image/webp"
        data = file.read(PREVIEW.bytes + 1)
    if not small:
        return data, TYPES[path.suffix]
    made = thumbnail(data)
    return_freed_memory()
    if made is None:
        return None
    _thumbnails.put(key, made)
    return made, "image/webp"


def thumbnail(data: bytes) -> bytes | None:
    """Make the thumbnail of an image, or of the first frame of a video; None where it can't be read."""
    try:
        with Image.open(BytesIO(data), formats=["PNG", "WEBP"]) as opened:
            if opened.width * opened.height > PREVIEW.pixels:
                return None
            with page_pixels.decoding(opened.width * opened.height):
                picture = _reduced(opened).convert("RGB")
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
        picture.save(made := BytesIO(), "WEBP", quality=80)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError):
        return None
    return made.getvalue()


def _reduced(opened: Image.Image) -> Image.Image:
    """Decode a picture, and divide its sides while they are far larger than a thumbnail's: its copies are small so."""
    factor = max(opened.size) // (3 * THUMBNAIL)
    return opened.reduce(factor) if factor > 1 and opened.mode in _REDUCIBLE else opened


def compared_saves(folder: RunFolder) -> list[str]:
    """Names of a run's saves as ComfyUI's LoRA loaders list them, by step, the newest last; of many, some."""
    plain = [path for path in folder.loras() if own_file(path.parent, path.name) is not None]
    return [path.relative_to(runs_folder()).as_posix() for path in spread(plain, MOST_COMPARED)]


def read_workflow(folder: RunFolder) -> dict[str, Any]:
    """Read the workflow that made a run, `{"workflow": …}` or, where only that is known, `{"prompt": …}`, else empty.

    It lies beside the LoRA.
    """
    for kind, suffix in (("workflow", WORKFLOW), ("prompt", API)):
        path = own_file(folder.path, f"{folder.name}.{suffix}")
        if path is not None:
            with suppress(OSError, ValueError, RecursionError):
                found = read_json(path, WORKFLOW_FILE)
                if isinstance(found, dict) and found:
                    return {kind: found}
    return {}


async def give_workflow(request: web.Request) -> web.Response:
    """Answer `/tessera/runs/{id}/workflow`."""
    folder = await asyncio.to_thread(known_runs.folder, request.match_info["id"])
    if folder is None:
        return refusal(NO_RUN, 404)
    with suppress(OSError):
        if found := await asyncio.to_thread(read_workflow, folder):
            return answer(found)
    return refusal(NO_WORKFLOW, 404)


async def list_previews(request: web.Request) -> web.Response:
    """Answer `/tessera/runs/{id}/previews`, and `/tessera/runs/{id}/previews?last=1` for the last one only."""
    folder = await asyncio.to_thread(known_runs.folder, request.match_info["id"])
    if folder is None:
        return refusal(NO_RUN, 404)
    most = 1 if "last" in request.query else MOST_LISTED
    return answer({"previews": await asyncio.to_thread(listed_previews, folder.path, most)})


async def show_preview(request: web.Request) -> web.Response:
    """Answer `/tessera/runs/{id}/previews/{step}/{row}`."""
    folder = await asyncio.to_thread(known_runs.folder, request.match_info["id"])
    step, row = (int(request.match_info[name]) for name in ("step", "row"))
    small = "small" in request.query
    found = None
    if folder is not None:
        with suppress(OSError):
            found = await asyncio.to_thread(read_preview, folder.path, step, row, small)
    if found is None:
        return refusal(GONE, 404)
    return web.Response(body=found[0], content_type=found[1], headers=HEADERS)


async def list_saves(request: web.Request) -> web.Response:
    """Answer `/tessera/runs/{id}/saves`."""
    folder = await asyncio.to_thread(known_runs.folder, request.match_info["id"])
    if folder is None:
        return refusal(NO_RUN, 404)
    return answer({"loras": await asyncio.to_thread(compared_saves, folder)})


def add_routes(routes: web.RouteTableDef) -> None:
    """Add the routes to those of ComfyUI's server."""
    routes.get("/tessera/runs/{id}/previews")(list_previews)
    routes.get("/tessera/runs/{id}/previews/{step:[0-9]{1,8}}/{row:[0-9]{1,4}}")(show_preview)
    routes.get("/tessera/runs/{id}/saves")(list_saves)
    routes.get("/tessera/runs/{id}/workflow")(give_workflow)

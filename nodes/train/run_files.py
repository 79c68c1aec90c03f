"""Routes to the files of a run: its previews, and the names of its saves.

GET `/tessera/runs/{id}/previews` lists the previews, `/tessera/runs/{id}/previews/{step}/{row}` returns one of them,
with `?small=1` a thumbnail. GET `/tessera/runs/{id}/saves` names the LoRAs to compare. A file is named by run, step and
row, never by a path, and links are not followed. GET `/tessera/runs/{id}/workflow` returns the workflow of a run, and
`/tessera/runs/{id}/report` its report as a page, with `?beside={id}` that of two runs side by side.
"""

import asyncio
import os
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from aiohttp import web

from ...common.untrusted.budgets import PREVIEW, WORKFLOW_FILE
from ...common.untrusted.in_flight import return_freed_memory
from ...common.untrusted.json_text import read_json
from ...common.untrusted.regular_files import open_regular
from ...train.preview.contact_sheet import spread
from ...train.preview.gallery import INDEX, previews_folder, read_index
from ...train.preview.thumbnails import small_picture
from ...train.run_report.files import page_of
from ...train.runs.run_folder import RunFolder
from ...train.runs.run_record import own_file
from ..common.answers import answer, refusal
from ..common.byte_cache import ByteCache
from ..common.saved_workflow import API, WORKFLOW
from .run import runs_folder
from .run_index import text_of
from .run_routes import NO_RUN, known_runs

MOST_LISTED = 2000
MOST_COMPARED = 12  # columns that keep a grid readable
THUMBNAIL = 192  # pixels of the longer side
MOST_CACHED = 4 << 20  # bytes of thumbnails in memory, a few KB each
TYPES = {".png": "image/png", ".webp": "image/webp"}
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox",
    "Cache-Control": "private, max-age=31536000, immutable",  # the URL contains the file's modification time
}
NO_WORKFLOW = "This run has no workflow: it was queued without one, or ComfyUI runs with --disable-metadata."
PAGE_HEADERS = {
    **HEADERS,
    "Content-Security-Policy": "default-src 'none'; img-src data:; style-src 'unsafe-inline'; sandbox",
    "Cache-Control": "no-store",
}
GONE = "There is no such preview any more; list those of the run again."

_thumbnails = ByteCache(MOST_CACHED)


def listed_previews(run: Path, limit: int = MOST_LISTED) -> list[dict[str, Any]]:
    """List the newest previews of a run, by step and row; `changed` differs once a file is rewritten."""
    folder = previews_folder(run)
    index = folder and own_file(folder, INDEX)
    if folder is None or index is None:
        return []
    previews = []
    for shot in sorted(read_index(folder), key=lambda shot: (shot.step, shot.row))[-limit:]:
        if (path := own_file(folder, shot.file)) is not None:
            changed = f"{path.stat().st_mtime_ns:x}"
            previews.append({"step": shot.step, "row": shot.row, "title": text_of(shot.title), "changed": changed})
    return previews


def read_preview(run: Path, step: int, row: int, small: bool) -> tuple[bytes, str] | None:
    """Read a preview, or make its thumbnail. Returns the bytes and their content type; None if there is none."""
    folder = previews_folder(run)
    if folder is None:
        return None
    candidates = (own_file(folder, f"step{step:06d}_{row}{ending}") for ending in TYPES)
    path = next((path for path in candidates if path is not None), None)
    if path is None:
        return None
    with open_regular(path, follow_links=False) as file:  # a link or a pipe may have replaced it meanwhile
        status = os.fstat(file.fileno())
        if status.st_size > PREVIEW.bytes:
            return None
        key = path, status.st_mtime_ns, status.st_size
        if small and (small_image := _thumbnails.find(key)) is not None:
            return small_image, "image/webp"
        data = file.read(PREVIEW.bytes + 1)
    if not small:
        return data, TYPES[path.suffix]
    small_image = thumbnail(data)
    return_freed_memory()
    if small_image is None:
        return None
    _thumbnails.put(key, small_image)
    return small_image, "image/webp"


def thumbnail(data: bytes) -> bytes | None:
    """Make the thumbnail of an image, or of the first frame of a video; None if it can't be read."""
    picture = small_picture(data, THUMBNAIL)
    if picture is None:
        return None
    picture.save(buffer := BytesIO(), "WEBP", quality=80)
    return buffer.getvalue()


def compared_saves(folder: RunFolder) -> list[str]:
    """Return the names of a run's saves as listed by ComfyUI's LoRA loaders, by step; a selection if there are many."""
    plain = [path for path in folder.loras() if own_file(path.parent, path.name) is not None]
    return [path.relative_to(runs_folder()).as_posix() for path in spread(plain, MOST_COMPARED)]


def read_workflow(folder: RunFolder, prompt_only: bool = False) -> dict[str, Any]:
    """Read the workflow that made a run from next to its LoRA.

    prompt_only: read the prompt that was queued, which can be queued again.

    Returns `{"workflow": …}`, or `{"prompt": …}` if only that is there or asked for, else an empty dict.
    """
    for kind, suffix in (("workflow", WORKFLOW), ("prompt", API))[prompt_only:]:
        path = own_file(folder.path, f"{folder.name}.{suffix}")
        if path is not None:
            with suppress(OSError, ValueError):
                content = read_json(path, WORKFLOW_FILE)
                if isinstance(content, dict) and content:
                    return {kind: content}
    return {}


async def give_workflow(request: web.Request) -> web.Response:
    """Answer `/tessera/runs/{id}/workflow`, and `/tessera/runs/{id}/workflow?prompt=1` for the queued prompt."""
    folder = await asyncio.to_thread(known_runs.folder, request.match_info["id"])
    if folder is None:
        return refusal(NO_RUN, 404)
    with suppress(OSError):
        if workflow := await asyncio.to_thread(read_workflow, folder, "prompt" in request.query):
            return answer(workflow)
    return refusal(NO_WORKFLOW, 404)


async def list_previews(request: web.Request) -> web.Response:
    """Answer `/tessera/runs/{id}/previews`, and `/tessera/runs/{id}/previews?last=1` for the last one only."""
    folder = await asyncio.to_thread(known_runs.folder, request.match_info["id"])
    if folder is None:
        return refusal(NO_RUN, 404)
    limit = 1 if "last" in request.query else MOST_LISTED
    return answer({"previews": await asyncio.to_thread(listed_previews, folder.path, limit)})


async def show_preview(request: web.Request) -> web.Response:
    """Answer `/tessera/runs/{id}/previews/{step}/{row}`."""
    folder = await asyncio.to_thread(known_runs.folder, request.match_info["id"])
    step, row = (int(request.match_info[name]) for name in ("step", "row"))
    small = "small" in request.query
    preview = None
    if folder is not None:
        with suppress(OSError):
            preview = await asyncio.to_thread(read_preview, folder.path, step, row, small)
    if preview is None:
        return refusal(GONE, 404)
    return web.Response(body=preview[0], content_type=preview[1], headers=HEADERS)


async def show_report(request: web.Request) -> web.Response:
    """Answer `/tessera/runs/{id}/report`, and `/tessera/runs/{id}/report?beside={id}` for two runs."""
    ids = [request.match_info["id"], *request.query.getall("beside", [])[:1]]
    folders = [folder for id in ids if (folder := await asyncio.to_thread(known_runs.folder, id)) is not None]
    page = None
    if len(folders) == len(ids):
        with suppress(OSError):
            page = await asyncio.to_thread(page_of, *folders)
    if page is None:
        return refusal(NO_RUN, 404)
    response = web.Response(text=page, content_type="text/html", headers=PAGE_HEADERS)
    await response.prepare(request)  # sent: with --disable-api-nodes ComfyUI replaces the policy of what is not
    return response


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
    routes.get("/tessera/runs/{id}/report")(show_report)
    routes.get("/tessera/runs/{id}/workflow")(give_workflow)

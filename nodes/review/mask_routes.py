"""Routes with which a page draws the mask of a picture.

GET `/tessera/folder/picture` returns a picture of 1024 pixels, GET `/tessera/mask` its mask, and POST `/tessera/mask`
saves one, `{"folder", "file", …, "mask": base64 of a PNG}`, beside the picture or in the mask folder. A mask is saved
only inside ComfyUI's input folder, only for a picture that the list of the folder holds, and only if a page of this
server asks.
"""

import asyncio
import base64
import binascii
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from ...common.untrusted.budgets import MASK_REQUEST
from ...common.untrusted.in_flight import return_freed_memory
from ...data.layouts.layout import read_layout
from ...data.layouts.subsets import Example
from ...data.media.images import inspect_image
from ...data.media.thumbnails import image_thumbnail
from ...data.review.drawn_masks import SHOWN, mask_place, save_mask, shown_mask
from ..common.answers import answer, refusal
from ..common.asked_by import posted_object, refused_change
from ..common.folder_access import is_allowed_file, resolve_folder
from ..data.folder_routes import listed_file, request_of
from ..data.image_inputs import NONE
from .mask_places import place_in_input

PICTURES = "pictures"
_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
# One at a time: each may hold the pixels of a large picture.
_threads = ThreadPoolExecutor(1, "tessera-mask")

T = TypeVar("T")


def picture_of(query: Mapping[str, str]) -> bytes:
    """Return a picture to draw on, as WebP. Raises ValueError as `listed_file` does."""
    path, name = listed_file(PICTURES, query.get("folder", ""), query.get("file", ""))
    data = image_thumbnail(path, Path(name).name, SHOWN)
    return_freed_memory()
    return data


def mask_of(query: Mapping[str, str]) -> bytes:
    """Return the mask of a picture, as PNG; empty if it has none. Raises ValueError as `listed_file` does."""
    place = _place(query)[1]
    if not place.is_file():
        return b""
    if not is_allowed_file(place):
        raise ValueError("The mask is a link to a place outside the folders that may be read.")
    data = shown_mask(place)
    return_freed_memory()
    return data


def put_mask(query: Mapping[str, str], mask_bytes: bytes) -> str:
    """Save the mask of a picture; returns its path below ComfyUI's input folder.

    Raises ValueError for a picture that isn't listed, a place outside of the input folder, and a broken mask.
    """
    example, place = _place(query)
    real, name = place_in_input(place)
    is_new = not real.exists()
    save_mask(real, mask_bytes, inspect_image(example.path, example.path.name).size)
    return_freed_memory()
    if not _mask_folder(query) and _example(query).mask is None:
        if is_new:
            real.unlink()
        raise ValueError("With this layout no masks beside pictures are read; choose a mask_folder.")
    return name


def _place(query: Mapping[str, str]) -> tuple[Example, Path]:
    example = _example(query)
    return example, mask_place(example, _mask_folder(query))


def _mask_folder(query: Mapping[str, str]) -> Path | None:
    choice = query.get("mask_folder", "")
    return None if choice in ("", NONE) else resolve_folder(choice)


def _example(query: Mapping[str, str]) -> Example:
    """Find a picture in the layout of its folder."""
    path, _ = listed_file(PICTURES, query.get("folder", ""), query.get("file", ""))
    for subset in read_layout(request_of(PICTURES, query)).subsets:
        for example in subset.examples:
            if os.path.realpath(example.path) == str(path):
                return example
    raise ValueError("There is no picture of this name in the folder any more.")


async def show_picture(request: web.Request) -> web.Response:
    """Answer `/tessera/folder/picture`."""
    return await _send(lambda: picture_of(request.query), "image/webp")


async def show_mask(request: web.Request) -> web.Response:
    """Answer GET `/tessera/mask`."""
    return await _send(lambda: mask_of(request.query), "image/png")


async def receive_mask(request: web.Request) -> web.Response:
    """Answer POST `/tessera/mask`."""
    if (refused := await refused_change(request)) is not None:
        return refused
    if (request.content_length or 0) > MASK_REQUEST.bytes:
        return refusal("The mask is too large; draw it in another program.", 413)
    body = await posted_object(request, MASK_REQUEST)
    if not body or not all(isinstance(value, str) for value in body.values()):
        return refusal("Give folder, file and mask as texts.", 400)
    try:
        mask_bytes = base64.b64decode(body.get("mask", ""), validate=True)
    except (ValueError, binascii.Error):
        return refusal("The mask is not base64.", 400)
    reply = await _answer_of(lambda: put_mask(body, mask_bytes))
    return reply if isinstance(reply, web.Response) else answer({"saved": reply})


async def _send(make: Callable[[], bytes], content_type: str) -> web.Response:
    data = await _answer_of(make)
    return (
        data if isinstance(data, web.Response) else web.Response(body=data, content_type=content_type, headers=_HEADERS)
    )


async def _answer_of(work: Callable[[], T]) -> T | web.Response:
    """Do the work on the thread of this module; answer with one sentence if it fails."""
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads, work)
    except ValueError as error:
        return refusal(str(error), 400, _HEADERS)
    except OSError as error:
        return refusal(error.strerror or str(error), 409, _HEADERS)
    except Exception:  # decoders raise many kinds of errors for deliberately broken files
        return refusal("The file can't be read.", 400, _HEADERS)


def add_routes(routes: web.RouteTableDef) -> None:
    """Add the routes to those of ComfyUI's server."""
    routes.get("/tessera/folder/picture")(show_picture)
    routes.get("/tessera/mask")(show_mask)
    routes.post("/tessera/mask")(receive_mask)

"""Routes with which a page reads and changes the line of trainings in ComfyUI's queue.

GET `/tessera/line` lists the trainings that wait. POST `/tessera/line` with `{"order": [prompt ids]}` changes their
order. POST `/tessera/go_on` with `{"prompt_id": …}` queues a training again that its user has paused.
"""

import asyncio

from aiohttp import web

from ..common.answers import answer, refusal
from ..common.asked_by import posted_object, refused_change
from .turns import go_on, line, reorder

_MOST_IDS = 1000


async def read_line(_: web.Request) -> web.Response:
    """Answer `/tessera/line`."""
    return answer({"line": await asyncio.to_thread(line)})


async def change_line(request: web.Request) -> web.Response:
    """Answer POST `/tessera/line`."""
    if (refused := await refused_change(request)) is not None:
        return refused
    order = (await posted_object(request)).get("order")
    if not isinstance(order, list) or len(order) > _MOST_IDS or not all(isinstance(id, str) for id in order):
        return refusal(f"Give order: a list of at most {_MOST_IDS} prompt ids.", 400)
    await asyncio.to_thread(reorder, order)
    return await read_line(request)


async def continue_paused(request: web.Request) -> web.Response:
    """Answer POST `/tessera/go_on`."""
    if (refused := await refused_change(request)) is not None:
        return refused
    prompt_id = (await posted_object(request)).get("prompt_id")
    if not isinstance(prompt_id, str) or not (following := await asyncio.to_thread(go_on, prompt_id)):
        return refusal("This server holds no paused prompt of that id; queue its workflow again to go on.", 409)
    return answer({"prompt_id": following})


def add_routes(routes: web.RouteTableDef) -> None:
    """Add the routes to those of ComfyUI's server."""
    routes.get("/tessera/line")(read_line)
    routes.post("/tessera/line")(change_line)
    routes.post("/tessera/go_on")(continue_paused)

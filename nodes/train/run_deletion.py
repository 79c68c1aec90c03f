"""Routes that delete a run, restore it and empty the trash.

POST `/tessera/runs/{id}/delete` moves the files of a run that this pack wrote to `output/.tessera-trash/<date>`,
`/tessera/runs/{id}/restore` moves them back, and `/tessera/trash/empty` removes all deleted runs. All three are off if
anyone but the user of this machine can send requests. GET `/tessera/trash` lists the trash.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import folder_paths
from aiohttp import web

from ...common.files import MACHINE
from ...train.preflight.claim import lock_folder, may_be_training
from ...train.runs.run_folder import RunFolder
from ...train.runs.run_names import TRASH
from ...train.runs.run_record import RunReader
from ...train.runs.run_trash import (
    deleted_runs,
    move_to_trash,
    own_files,
    remove_for_good,
    restore,
)
from ..common import training_now
from ..common.answers import answer, refusal
from ..common.asked_by import host_of, is_loopback, listens_to_itself, refused_post
from ..common.folder_access import SETTINGS_FILE, read_settings
from .run import runs_folder
from .run_routes import NO_RUN, id_of, known_runs

STILL_ALIVE = 3600  # seconds after the last write of a run on another machine
FORWARDING = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP")  # headers added by proxies
_one_at_a_time = threading.Lock()  # concurrent requests could move files that another is listing or removing


class NoSuchRun(LookupError):
    """Raised for an id without a run. The message is for the user."""


def why_off(headers: Mapping[str, str]) -> str:
    """Return why runs can't be deleted from the browser; empty if they can.

    headers: headers of the request. A Host other than this machine's means a tunnel, a proxy, or a foreign page that
    makes the browser treat this server as its own origin. A proxy on this machine may write this machine's name there,
    but most of those add a forwarding header; others are detected by the Origin of the page, see `_answer`.
    """
    try:
        if read_settings().delete_runs:
            return ""
    except ValueError as error:
        return str(error)
    forwarded = any(name in headers for name in FORWARDING)
    if listens_to_itself() and is_loopback(host_of(headers)) and not forwarded:
        return ""
    return (
        "Deleting runs is off, since this server can be reached from other machines; to allow it to all who can open "
        f'this page, write {{"delete_runs": true}} into {SETTINGS_FILE} in ComfyUI\'s user folder.'
    )


def trash_folder() -> Path:
    """Return the folder that deleted runs are moved to."""
    return Path(folder_paths.get_output_directory(), TRASH)


def delete(id: str) -> dict[str, Any]:
    """Move a run to the trash. Raises NoSuchRun for an unknown id, ValueError for a run that can't be deleted."""
    folder = known_runs.folder(id)
    if folder is None:
        raise NoSuchRun(NO_RUN)
    root, day = runs_folder(), f"{datetime.now():%Y-%m-%d}"
    with _one_at_a_time, ExitStack() as claim:
        try:
            claim.enter_context(lock_folder(folder.path))  # first: from here on no run begins
        except ValueError:
            _check_over(folder)
            raise ValueError(f"{folder.path.name} is in training in another ComfyUI; stop it there first.") from None
        _check_over(folder)
        target, remaining_files = move_to_trash(folder, root, trash_folder(), day)
    place = target.relative_to(folder_paths.get_output_directory())
    return {"folder": folder.path.relative_to(root).as_posix(), "trash": place.as_posix(), "left": remaining_files}


def _check_over(folder: RunFolder) -> None:
    """Raise ValueError if a run is, or may be, in training."""
    name = folder.path.name
    if training_now.running_in(folder.path) is not None:
        raise ValueError(f"{name} is in training; stop it first.")
    reader = RunReader(folder.path)
    facts, ended = reader.facts(), reader.read().status
    machine = facts.get("machine", MACHINE)
    age = time.time() - max((file.stat().st_mtime for file in folder.path.glob("*") if file.is_file()), default=0.0)
    if ended or age > STILL_ALIVE:
        return
    if machine != MACHINE:
        raise ValueError(f"{name} may be in training on another machine; try again an hour after its last step.")
    if may_be_training(facts):  # in a ComfyUI with another temporary folder, so that the lock is not shared
        raise ValueError(f"{name} is in training in another ComfyUI; stop it there first.")


def bring_back(id: str) -> dict[str, Any]:
    """Restore the last deleted run of this id. Raises as `delete` does."""
    root = runs_folder()
    with _one_at_a_time:
        for day, run in deleted_runs(trash_folder()):
            if id_of(run.folder.path, day) == id:
                place = run.folder.path.relative_to(day)
                restore(run.folder, root / place, root, trash_folder())
                return {"folder": place.as_posix()}
    raise NoSuchRun(f"The files of this run are not in output/{TRASH} any more.")


def list_trash() -> dict[str, Any]:
    """List the runs in the trash, last deleted first, each place once, and the total bytes of all files."""
    runs: dict[str, dict[str, Any]] = {}
    total = 0
    with _one_at_a_time:
        for day, run in deleted_runs(trash_folder()):
            size = sum((run.folder.path / file).stat().st_size for file in own_files(run.folder))
            place, total = run.folder.path.relative_to(day).as_posix(), total + size
            id = id_of(run.folder.path, day)
            runs.setdefault(id, {"id": id, "folder": place, "day": day.name[: len("2026-11-24")], "bytes": size})
    return {"runs": list(runs.values()), "bytes": total}


def empty_trash() -> dict[str, Any]:
    """Remove the files of all runs in the trash. Raises OSError for one that can't be removed."""
    with _one_at_a_time:
        runs = [run for _, run in deleted_runs(trash_folder())]
        for run in runs:
            remove_for_good(run.folder, trash_folder())
    return {"removed": len(runs)}


async def delete_run(request: web.Request) -> web.Response:
    """Answer POST `/tessera/runs/{id}/delete`."""
    return await _answer(request, lambda: delete(request.match_info["id"]))


async def restore_run(request: web.Request) -> web.Response:
    """Answer POST `/tessera/runs/{id}/restore`."""
    return await _answer(request, lambda: bring_back(request.match_info["id"]))


async def remove_deleted(request: web.Request) -> web.Response:
    """Answer POST `/tessera/trash/empty`."""
    return await _answer(request, empty_trash)


async def read_trash(request: web.Request) -> web.Response:
    """Answer `/tessera/trash`: `{"runs": [{"id", "folder", "day", "bytes"}], "bytes"}`."""
    try:
        return answer(await asyncio.to_thread(list_trash))
    except OSError as error:
        return _refused(error)


async def _answer(request: web.Request, action: Callable[[], dict[str, Any]]) -> web.Response:
    if (refused := refused_post(request)) is not None:
        return refused
    if "Origin" not in request.headers:  # every browser sends it, and a page behind a proxy can't send this machine's
        return refusal("Only a page of this server may ask that.", 403)
    if reason := why_off(request.headers):
        return refusal(reason, 403)
    try:
        return answer(await asyncio.to_thread(action))
    except NoSuchRun as error:
        return refusal(str(error), 404)
    except ValueError as error:
        return refusal(str(error), 409)
    except OSError as error:
        return _refused(error)


def _refused(error: OSError) -> web.Response:
    name = Path(str(error.filename or TRASH)).name
    fix = "make sure that ComfyUI may read and move the files of this run."
    return refusal(f"{name}: {error.strerror or error}; {fix}", 409)


async def may_delete(request: web.Request) -> web.Response:
    """Answer `/tessera/deleting`: why runs can't be deleted, empty if they can."""
    return answer({"off": why_off(request.headers)})


def add_routes(routes: web.RouteTableDef) -> None:
    """Add the routes to those of ComfyUI's server."""
    routes.get("/tessera/deleting")(may_delete)
    routes.get("/tessera/trash")(read_trash)
    routes.post("/tessera/trash/empty")(remove_deleted)
    routes.post("/tessera/runs/{id}/delete")(delete_run)
    routes.post("/tessera/runs/{id}/restore")(restore_run)

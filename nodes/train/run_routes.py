"""Routes with which a page reads the runs of this server and controls the one that trains.

GET `/tessera/runs?name=`, `/tessera/runs?filter=&page=` and `/tessera/runs/{id}?since=&points=` only read. POST
`/tessera/runs/{id}/save`, `/sample`, `/stop` and `/pause` take effect between two steps. A run is named by an id from
one of the first two, never by a path.
"""

import asyncio
import hashlib
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from aiohttp import web

from ...common.file_names import plain_name
from ...common.untrusted.budgets import CURVE
from ...train.config.expert_pair import HIGH, LOW
from ...train.report.observer import PAUSE, SAMPLE, SAVE, STOP
from ...train.runs.run_folder import RunFolder, run_folders
from ...train.runs.run_record import (
    MOST_POINTS,
    PROGRESS,
    RUN,
    SUMMARY,
    RunReader,
    averaged,
    loss_ends,
    own_file,
    thinned,
)
from ...train.train_lora import PAUSED
from ..common import training_now
from ..common.answers import answer, refusal
from ..common.asked_by import posted_object, refused_change
from ..queue.turns import outlook
from .run import runs_folder
from .run_index import PAGE, RunIndex, page_of, steps_of, text_of

MOST_LISTED = 20
MOST_READERS = 8  # readers whose curves stay in memory
NO_RUN = "There is no such run; list the runs first."


@dataclass
class SharedReader:
    """Reader of a run, used by one request at a time.

    reader: the reader, which keeps the curve that it has read.
    lock: held by the request that uses it.
    """

    reader: RunReader
    lock: threading.Lock = field(default_factory=threading.Lock)


class Runs:
    """Runs below a folder, as served by the routes."""

    def __init__(self) -> None:
        self._folders: dict[str, RunFolder] = {}
        self._readers: OrderedDict[Path, SharedReader] = OrderedDict()
        self._index = RunIndex()
        self._lock = threading.Lock()  # several threads answer requests

    def by_output_name(self, name: str) -> list[dict[str, Any]]:
        """List the runs of an output name, including those of a pair of experts: the one that trains, then the newest.

        Raises ValueError if it is no output name.
        """
        root, name = runs_folder(), plain_name(name)
        candidates = [
            (training_now.running_in(folder.path) is not None, changed, str(folder.path), folder)
            for ending in ("", f"_{HIGH}", f"_{LOW}")
            for folder in run_folders(root, f"{name}{ending}")
            if _lies_in(folder.path, root) and (changed := _changed(folder.path))
        ]
        newest = [folder for *_, folder in sorted(candidates, key=itemgetter(0, 1, 2), reverse=True)[:MOST_LISTED]]
        with self._lock:
            self._folders |= {id_of(folder.path, root): folder for folder in newest}
        paths = [folder.path for folder in newest]
        return [{"id": id_of(path, root), "folder": path.name, **_state_of(path)} for path in paths]

    def page(self, query: str, number: int) -> dict[str, Any]:
        """List a page of the runs with every word of `query` in place, name or model. number: page, from 0."""
        root = runs_folder()
        matches = self._index.search(root, query)
        entries = page_of(matches, number)
        with self._lock:
            self._folders |= {id_of(run.folder.path, root): run.folder for run in entries}
        runs = [
            {
                "id": id_of(run.folder.path, root),
                "folder": run.place,
                "changed": run.changed,
                **run.facts,
                "running": training_now.running_in(run.folder.path) is not None,
            }
            for run in entries
        ]
        return {"count": len(matches), "page": number, "pages": -(-len(matches) // PAGE), "runs": runs}

    def ask(self, id: str, prompt_id: str, action: str) -> bool | None:
        """Request an action of a run, see `training_now.ask`. None for an unknown id."""
        with self._lock:
            folder = self._folders.get(id)
        return None if folder is None else training_now.ask(folder.path, prompt_id, action)

    def can_sample(self, id: str) -> bool | None:
        """Return whether a run has previews to make. None for an unknown id."""
        folder = self.folder(id)
        return None if folder is None else RunReader(folder.path).facts().get("can_sample") is True

    def can_pause(self, id: str) -> bool:
        """Return whether a run trains now and can be paused."""
        folder = self.folder(id)
        run = None if folder is None else training_now.running_in(folder.path)
        return run is not None and run.can_pause

    def folder(self, id: str) -> RunFolder | None:
        """Return the folder of a run; None for an unknown id, or if it is gone or now a link."""
        with self._lock:
            return self._existing_folder(id)

    def _existing_folder(self, id: str) -> RunFolder | None:
        """Return the same as `folder`, with the lock held."""
        folder = self._folders.get(id)
        return folder if folder and _lies_in(folder.path, runs_folder()) and _changed(folder.path) else None

    def _drop_readers(self) -> None:
        """Evict the least recently read curves, until few are left with few points in total."""
        while len(self._readers) > 1:
            points = sum(len(shared_reader.reader.curve.loss) for shared_reader in self._readers.values())
            if len(self._readers) <= MOST_READERS and points <= CURVE.items:
                return
            self._readers.popitem(last=False)

    def read(self, id: str, since: int, points: int = MOST_POINTS) -> dict[str, Any] | None:
        """Read a run: its facts, its training state, and its curve after step `since`. None for an unknown id.

        points: number of points that each series is thinned to.
        """
        with self._lock:
            run_folder = self._existing_folder(id)
            if run_folder is None:
                return None
            root, folder = runs_folder(), run_folder.path
            shared_reader = self._readers.pop(folder, None) or SharedReader(RunReader(folder))
            self._readers[folder] = shared_reader
            self._drop_readers()
        with shared_reader.lock:  # per run: a large record delays no other run and no list
            try:
                facts, curve = shared_reader.reader.facts(), shared_reader.reader.read()
            except OSError:  # deleted meanwhile
                return None
            steps, newest = steps_of(facts), _newest_lora(run_folder, root)
            window = max(10, steps // 20)
            # Losses up to one window before `since` are part of the first means after it.
            begin = max(0, bisect_right(list(curve.loss), since) - window)
            losses = averaged(list(curve.loss.values())[begin:], window)
            text = {name: text_of(facts.get(name)) for name in ("output_name", "model", "started", "prompt_id")}
            return {
                "id": id,
                "folder": folder.name,
                **text,
                "steps": steps,
                "step": curve.step,
                "loss": thinned([point for point in losses if point[0] > since], points),
                "validation": thinned(list(curve.validation.values()), points),
                "saves": [step for step, _ in thinned(list(curve.saves.values()))],
                "previews": list(curve.previews)[-MOST_POINTS:],
                "notes": list(curve.notes),
                "status": curve.status,
                "text": curve.text,
                "can_go_on": facts.get("can_go_on") is True,
                "can_sample": facts.get("can_sample") is True,
                "lora": newest if own_file(run_folder.path, run_folder.lora_path.name) else "",
                "last_lora": newest,
                "loss_ends": loss_ends([loss for _, loss, _ in curve.loss.values()]),
                "seconds": curve.seconds,
                "timed_from": curve.timed_from,
                "first_steps": curve.first_steps or steps,
                "changed": _changed(folder),
                **(outlook(text["prompt_id"]) if curve.status == PAUSED else {}),
                **_state_of(folder),
            }


def id_of(folder: Path, root: Path) -> str:
    """Return the id of a run, a hash of its folder relative to the folder of all runs."""
    return hashlib.blake2b(os.fsencode(folder.relative_to(root).as_posix()), digest_size=8).hexdigest()


def _lies_in(folder: Path, root: Path) -> bool:
    return folder.resolve().is_relative_to(root.resolve()) and not folder.is_symlink()


def _changed(folder: Path) -> float:
    """Return the time of the last change of a run's record; 0 if the folder is not a run."""
    changed = 0.0
    for path in (own_file(folder, name) for name in (PROGRESS, RUN, SUMMARY)):
        with suppress(FileNotFoundError):  # deleted just now
            changed = max(changed, path.stat().st_mtime if path is not None else 0.0)
    return changed


def _newest_lora(folder: RunFolder, root: Path) -> str:
    """Return the name of a run's latest LoRA as listed by ComfyUI's LoRA loaders; empty if there is none."""
    saves = [path for path in folder.loras() if _lies_in(path.parent, folder.path)]
    return next((str(path.relative_to(root)) for path in saves[::-1] if own_file(path.parent, path.name)), "")


def _state_of(folder: Path) -> dict[str, Any]:
    """Return whether a run trains now, on which node, and its progress."""
    run = training_now.running_in(folder)
    if run is None:
        return {"running": False}
    report = run.report
    return {
        "running": True,
        "node": run.node_id,
        "prompt_id": run.prompt_id,
        "phase": run.phase,
        "can_pause": run.can_pause,
        "seconds_per_step": report and report.seconds_per_step,
        "seconds_left": report and report.seconds_left,
    }


known_runs = Runs()


async def list_runs(request: web.Request) -> web.Response:
    """Answer `/tessera/runs?name=my_lora`, and `/tessera/runs?filter=fox&page=0` of all runs."""
    query = request.query
    if "name" not in query:
        if (page := _number(query.get("page", "0"))) is None:
            return refusal("page is not a number; give 0 or more.", 400)
        return answer(await asyncio.to_thread(known_runs.page, query.get("filter", ""), page))
    try:
        runs = await asyncio.to_thread(known_runs.by_output_name, query["name"])
    except ValueError as error:
        return refusal(str(error), 400)
    return answer({"runs": runs})


async def read_run(request: web.Request) -> web.Response:
    """Answer `/tessera/runs/{id}?since=0&points=2000`."""
    since, points = (_number(request.query.get(name, start)) for name, start in _READ.items())
    if since is None:
        return refusal("since is not a step; give 0 or more.", 400)
    if points is None or not 3 <= points <= MOST_POINTS:
        return refusal(f"points is not a number from 3 to {MOST_POINTS}.", 400)
    record = await asyncio.to_thread(known_runs.read, request.match_info["id"], since, points)
    if record is None:
        return refusal(NO_RUN, 404)
    return answer(record)


_READ = {"since": "0", "points": str(MOST_POINTS)}


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else None


async def ask_run(request: web.Request) -> web.Response:
    """Answer POST `/tessera/runs/{id}/save`, `/sample`, `/stop`, `/pause` with the `{"prompt_id": …}` of the run."""
    if (refused := await refused_change(request)) is not None:
        return refused
    prompt_id = (await posted_object(request)).get("prompt_id")
    if not isinstance(prompt_id, str):
        return refusal("Give the prompt_id of the run.", 400)
    action = request.match_info["what"]
    if action == SAMPLE and await asyncio.to_thread(known_runs.can_sample, request.match_info["id"]) is False:
        fix = "It has no Training Preview, so there is nothing to sample; connect one to preview and run it again."
        return refusal(fix, 409)
    if action == PAUSE and not await asyncio.to_thread(known_runs.can_pause, request.match_info["id"]):
        return refusal("This run can't be paused now; Stop and keep ends it so that Run goes on.", 409)
    accepted = await asyncio.to_thread(known_runs.ask, request.match_info["id"], prompt_id, action)
    if accepted is None:
        return refusal(NO_RUN, 404)
    if not accepted:
        return refusal("This run isn't training right now.", 409)
    return answer({"asked": action})


def add_routes(routes: web.RouteTableDef) -> None:
    """Add the routes to those of ComfyUI's server."""
    routes.get("/tessera/runs")(list_runs)
    routes.get("/tessera/runs/{id}")(read_run)
    routes.post(f"/tessera/runs/{{id}}/{{what:{SAVE}|{STOP}|{SAMPLE}|{PAUSE}}}")(ask_run)

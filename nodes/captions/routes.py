"""Routes of the editor of captions in the gallery of Training Images and Training Clips.

GET `/tessera/captions?kind=pictures&folder=input/foxes&file=&step=1&only=missing` returns one caption as its file has
it: of `file` (an id of `/tessera/folder`), or of its next (1) or previous (-1) neighbour. POST
`/tessera/captions/save` (which returns that neighbour too, if `step` and `only` are posted), `/replace` and `/undo`
write, only below ComfyUI's input and datasets folders, and only what a page of this server asks.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from aiohttp import web

from ...common.text import quoted
from ...common.untrusted.budgets import CAPTION_EDIT, OverBudget
from ...data.captioning.edits import (
    CaptionChanged,
    Change,
    EditableCaption,
    UndoList,
    apply_changes,
    editable_caption,
    editable_captions,
    find_replacements,
    save_caption,
)
from ...data.captioning.ledger import Ledger
from ...data.layouts.captions import CaptionSource, checked_extension
from ...data.layouts.layout import LayoutRequest, read_layout
from ...data.layouts.subsets import Example
from ..common.answers import answer, refusal
from ..common.asked_by import posted_json, refused_change
from ..common.folder_access import captions_folder, is_allowed_file
from ..data.folder_routes import KINDS, clean, file_id, request_of
from ..data.places import is_unpacked, may_write_caption

ALL = "all"
MISSING = "missing"
REVIEW = "review"
FILTERS = (ALL, MISSING, REVIEW)
_STEPS = {"-1": -1, "0": 0, "1": 1}
_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}

# One thread: no two edits at a time, and a folder on a slow drive occupies no thread that ComfyUI needs.
_editor = ThreadPoolExecutor(1, "tessera-captions")
_undo = UndoList()


def _place(query: Mapping[str, Any]) -> LayoutRequest:
    """Make the request for the folder that a page shows. Raises ValueError for what no page of ours sends."""
    if query.get("kind") not in KINDS:
        raise ValueError("kind is neither pictures nor clips.")
    if not all(isinstance(value, str) for value in query.values()):
        raise ValueError("The place of a caption is text.")
    return request_of(query["kind"], query)


class ShownFolder:
    """Captions of a folder as the editor walks through them."""

    def __init__(self, request: LayoutRequest):
        self.folder = request.folder
        self.extension = checked_extension(request.extension)
        self.layout = read_layout(request)
        self.ledger = Ledger(captions_folder())
        self.examples = [(subset, example) for subset in self.layout.subsets for example in subset.examples]

    def id(self, example: Example) -> str:
        """Return the id of an example for the page."""
        return file_id(example.path, example.name, self.folder)

    def index(self, file: str) -> int | None:
        """Find the index of the example with this id."""
        return next((index for index, (_, example) in enumerate(self.examples) if self.id(example) == file), None)

    def neighbour(self, file: str, step: int, filter: str) -> int | None:
        """Return the index of the next (1) or previous (-1) example after a file, at 0 of itself; None at the end.

        filter: one of FILTERS. Without a file the walk begins at the first, or at the last.
        """
        start = self.index(file)
        if step == 0:
            return start
        index = (start if start is not None else (len(self.examples) if step < 0 else -1)) + step
        while 0 <= index < len(self.examples):
            if self.passes(self.examples[index][1], filter):
                return index
            index += step
        return None

    def passes(self, example: Example, filter: str) -> bool:
        """Return whether an example is one of those that are walked through."""
        return filter == ALL or (example.caption is None if filter == MISSING else self.ledger.waits(example.path))

    def caption(self, index: int) -> EditableCaption:
        subset, example = self.examples[index]
        caption = editable_caption(subset, example, self.extension, may_write_caption)
        file = caption.file
        if caption.has_file and not (is_allowed_file(file) or is_unpacked(file)):
            locked = f"The caption file {file.name!r} is a link to a place outside the allowed folders."
            return EditableCaption(example, file, None, locked)
        return caption

    def note_written(self, index: int, caption: EditableCaption) -> None:
        """Take note that a caption has a file of its own by now."""
        subset, example = self.examples[index]
        self.examples[index] = subset, replace(example, caption=CaptionSource(caption.file))

    def entry(self, index: int) -> dict[str, Any]:
        """Describe a caption for the page."""
        caption = self.caption(index)
        return {
            "file": self.id(caption.example),
            "name": clean(caption.example.name),
            "caption_file": clean(caption.file.name),
            "text": caption.text,
            "locked": clean(caption.locked),
            "at": index + 1,
            "count": len(self.examples),
            "missing": sum(example.caption is None for _, example in self.examples),
            "review": sum(self.ledger.waits(example.path) for _, example in self.examples),
        }


def _walk(query: Mapping[str, Any]) -> tuple[int, str]:
    """Read the step and the filter of a walk. Raises ValueError for others."""
    step, filter = _STEPS.get(str(query.get("step", "0"))), query.get("only", ALL)
    if step is None or filter not in FILTERS:
        raise ValueError("step is -1, 0 or 1, and only is all, missing or review.")
    return step, filter


def _entry(folder: ShownFolder, file: str, step: int, filter: str) -> dict[str, Any] | None:
    index = folder.neighbour(file, step, filter)
    return None if index is None else folder.entry(index)


def _show(query: Mapping[str, str]) -> dict[str, Any]:
    step, filter = _walk(query)
    folder = ShownFolder(_place({name: value for name, value in query.items() if name not in ("step", "only")}))
    return {"entry": _entry(folder, query.get("file", ""), step, filter)}


def _save(body: Mapping[str, Any]) -> dict[str, Any]:
    """Save a caption, and show the one to go on with: both in one reading of the folder."""
    step, filter = _walk(body)
    folder, before = ShownFolder(_place(body["place"])), body.get("before")
    file, text = body.get("file"), body.get("text")
    if not isinstance(file, str) or not isinstance(text, str) or not isinstance(before, str | None):
        raise ValueError("Give file, text and before of a caption.")
    index = folder.index(file)
    if index is None:
        raise CaptionChanged("This file isn't in the folder any more.")
    caption = folder.caption(index)
    change = save_caption(caption, text, before)
    folder.ledger.settle([caption.example.path])  # somebody looked at it
    folder.ledger.save()
    saved = {"undo": _undo.put([change]) if change is not None else None, "text": change.after if change else before}
    if change is not None:
        folder.note_written(index, caption)
    return saved | ({"entry": _entry(folder, file, step, filter)} if step else {})


def _replace(body: Mapping[str, Any]) -> dict[str, Any]:
    folder = ShownFolder(_place(body["place"]))
    search, replacement = body.get("search"), body.get("replacement")
    if not isinstance(search, str) or not isinstance(replacement, str):
        raise ValueError("Give search and replacement as texts.")
    captions = editable_captions(folder.layout, folder.extension, may_write_caption)
    replacements = find_replacements(
        (caption for caption in captions if is_allowed_file(caption.file) or is_unpacked(caption.file)),
        search,
        replacement,
        body.get("match_case") is True,
    )
    summary = {"matches": replacements.matches, "captions": len(replacements.changes), "locked": replacements.locked}
    if body.get("apply") is not True:
        return summary
    changes: tuple[Change, ...] = apply_changes(replacements.changes)
    return summary | {"captions": len(changes), "undo": _undo.put(changes) if changes else None}


def _take_back(body: Mapping[str, Any]) -> dict[str, Any]:
    restored, changed = _undo.undo(str(body.get("undo")))
    return {"restored": restored, "changed": [clean(name) for name in changed]}


async def _answered(work: Callable[[], dict[str, Any]]) -> web.Response:
    try:
        return answer(await asyncio.get_running_loop().run_in_executor(_editor, work), headers=_HEADERS)
    except CaptionChanged as error:
        return _refused(str(error), 409)
    except ValueError as error:
        return _refused(str(error))
    except OSError as error:
        return _refused(error.strerror or "The caption can't be written.", 500)


def _refused(sentence: str, status: int = 400) -> web.Response:
    return refusal(sentence, status, _HEADERS)


async def show_caption(request: web.Request) -> web.Response:
    """Answer GET `/tessera/captions`."""
    query = dict(request.query)
    return await _answered(lambda: _show(query))


def _posted(work: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Callable[[web.Request], Any]:
    """Make the handler of a POST whose body is a JSON object with the `place` of a folder."""

    async def handle(request: web.Request) -> web.Response:
        if (refused := await refused_change(request)) is not None:
            return refused
        try:
            body = await _body(request)
        except OverBudget as error:
            return _refused(str(error), 413)
        except ValueError as error:
            return _refused(f"The edit is not JSON ({quoted(str(error))}).")
        return await _answered(lambda: work(body))

    return handle


async def _body(request: web.Request) -> dict[str, Any]:
    """Read the JSON object of a request. Raises ValueError for anything else."""
    body = await posted_json(request, CAPTION_EDIT, "The edit")
    if not isinstance(body, dict) or not isinstance(body.get("place", {}), dict):
        raise ValueError("no object with a place")
    return {"place": {}} | body


def add_routes(routes: web.RouteTableDef) -> None:
    """Add the routes to those of ComfyUI's server."""
    routes.get("/tessera/captions")(show_caption)
    for name, work in (("save", _save), ("replace", _replace), ("undo", _take_back)):
        routes.post(f"/tessera/captions/{name}")(_posted(work))

"""Captions for the pictures of a folder by a model, written one by one so that a stopped run can go on."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ...common.files import sweep_unfinished, write_atomically
from ...common.fingerprint import fingerprint
from ...common.progress import Interrupted, Progress
from ...common.text import one_of, shortlist
from ...common.untrusted.budgets import CAPTION_FILE
from ...common.untrusted.regular_files import read_regular
from ..layouts.captions import checked_extension
from ..layouts.layout import LayoutRequest, read_layout
from ..layouts.subsets import Example, Subset
from ..media.images import inspect_image, load_image
from .edits import CaptionChanged, MayWrite, editable_caption, save_caption
from .instruction import CaptionStyle
from .ledger import Ledger, LedgerEntry

KEEP = "keep"
APPEND = "append"
REPLACE = "replace"
EXISTING = (KEEP, APPEND, REPLACE)
_SAVE_SECONDS = 2.0  # between two writes of the ledger


class Captioner(Protocol):
    """A model that writes captions, see `VisionLanguageModel` and `Tagger`."""

    def key(self) -> str:
        """Fingerprint the model and all settings that a caption depends on."""

    def caption(self, image: Tensor) -> str:
        """Write the caption of a picture (1, H, W, 3), without the trigger words; empty for no answer."""

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) at which the model sees a picture."""


@dataclass
class CaptionReport:
    """Result of captioning a folder, by names of pictures.

    written: with a new caption.
    kept: pictures with a caption that was left alone.
    done: captioned before, by the same model and settings.
    empty: the model answered nothing.
    failed: pictures that can't be read, with the reason.
    locked: captions that can't be written, with the reason.
    """

    written: list[str] = field(default_factory=list)
    kept: int = 0
    done: int = 0
    empty: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    locked: dict[str, str] = field(default_factory=dict)

    def count_kept(self) -> None:
        self.kept += 1

    def count_done(self) -> None:
        self.done += 1

    def summary(self) -> str:
        """Write the report as one line."""
        parts = [f"Captions written: {len(self.written)}"]
        parts += [f"written before: {self.done}"] * bool(self.done)
        parts += [f"left as they were: {self.kept}"] * bool(self.kept)
        review = " Press Review in the gallery to look at them." if self.written else ""
        return f"{', '.join(parts)}.{review}"

    def notes(self) -> Iterator[str]:
        """Yield the notes on pictures, by name."""
        if self.empty:
            yield f"The model had no answer for these, so they have no new caption: {shortlist(self.empty)}."
        if self.failed:
            yield f"These pictures can't be read: {shortlist(self.failed)}."
        for reason in dict.fromkeys(self.locked.values()):
            names = [name for name, other in self.locked.items() if other == reason]
            yield f"Not written for {shortlist(names)}: {reason}"


@dataclass(frozen=True)
class CaptionJob:
    """Captions to be written for a folder.

    request: the folder, see `read_layout`.
    captioner: the model.
    style: what captions should be like.
    existing: one of EXISTING, for pictures that have a caption.
    root: folder of the user for the ledger and what models answered.
    may_write: predicate for files that may be written.
    """

    request: LayoutRequest
    captioner: Captioner
    style: CaptionStyle
    existing: str
    root: Path
    may_write: MayWrite

    def __post_init__(self) -> None:
        one_of("existing_captions", self.existing, EXISTING)


def write_captions(job: CaptionJob, progress: Progress, interrupted: Interrupted) -> CaptionReport:
    """Write the captions of a folder, each beside its picture as soon as it is there.

    A picture that the same model captioned with the same settings is left as it is, also after somebody changed the
    caption. What a model answered is kept by the picture's bytes, the model and the settings.
    interrupted: called between pictures, and by the model; raises to stop.
    Raises ValueError as `read_layout` and the model do, and if no picture can be read; OSError for a full disk.
    """
    layout = read_layout(job.request)
    examples = [(subset, example) for subset in layout.subsets for example in subset.examples]
    if not examples:
        raise ValueError(f"The folder {job.request.folder.name!r} holds no pictures; put pictures into it.")
    writer = _Writer(job, interrupted)
    todo = [(subset, example) for subset, example in examples if writer.is_open(example)]
    try:
        for index, (subset, example) in enumerate(todo):
            interrupted()
            progress(index, len(todo), writer.text(index, len(todo)))
            writer.write(subset, example)
    finally:
        writer.ledger.save()
    progress(1, 1, writer.report.summary())
    if todo and len(writer.report.failed) == len(todo):
        raise ValueError(f"No picture of {job.request.folder.name!r} can be read: {writer.report.failed[0]}.")
    return writer.report


class _Writer:
    """Writes captions one by one."""

    def __init__(self, job: CaptionJob, interrupted: Interrupted):
        self.job = job
        self.interrupted = interrupted
        self.report = CaptionReport()
        self.ledger = Ledger(job.root)
        self.extension = checked_extension(job.request.extension)
        self._key = ""  # of the model, which reads all its weights
        self._start = self._saved = time.monotonic()

    def is_open(self, example: Example) -> bool:
        """Return whether a picture is to be captioned; one with a caption isn't if those are kept."""
        if self.job.existing == KEEP and example.caption is not None:
            self.report.count_kept()
            return False
        return True

    def text(self, index: int, count: int) -> str:
        """Say how far it is."""
        done_so_far = len(self.report.written)
        left = (time.monotonic() - self._start) / done_so_far * (count - index) if done_so_far else 0.0
        time_left = f", about {max(1, round(left / 60))} min left" if left > 60 else ""
        return f"Writing captions: {index} of {count}{time_left}"

    def write(self, subset: Subset, example: Example) -> None:
        """Write the caption of one picture, unless it can't be or needn't be."""
        caption = editable_caption(subset, example, self.extension, self.job.may_write)
        if caption.locked:
            self.report.locked[example.name] = caption.locked
            return
        try:
            digest = inspect_image(example.path, example.name).digest
        except ValueError:
            self.report.failed.append(example.name)
            return
        key = self._key_of(digest)
        entry = self.ledger.find(example.path)
        if entry is not None and entry.key == key and caption.has_file:
            self.report.count_done()
            return
        text = self._answer(example, digest, key)
        if text is None:
            return
        joined = self._joined(caption.text if caption.has_file else None, text)
        try:
            change = save_caption(caption, joined, caption.text)
        except CaptionChanged:
            self.report.locked[example.name] = "their captions were changed while the model looked at the pictures."
            return
        self.ledger.put(example.path, LedgerEntry(key, waits=change is not None))
        if change is None:  # the caption already says so
            self.report.count_done()
        else:
            self.report.written.append(example.name)
        if time.monotonic() - self._saved > _SAVE_SECONDS:
            self.ledger.save()
            self._saved = time.monotonic()

    def _key_of(self, digest: str) -> str:
        if not self._key:
            self._key = self.job.captioner.key()
            sweep_unfinished(self.job.root)
        return fingerprint(self._key, digest)

    def _answer(self, example: Example, digest: str, key: str) -> str | None:
        """Return what the model answers for a picture, now or before; None if there is no answer."""
        file = self.job.root / "answers" / key[:2] / f"{key}.txt"
        try:
            return read_regular(file, CAPTION_FILE).decode("utf-8")
        except (OSError, ValueError):
            pass
        try:
            image = _read_picture(example.path, example.name, digest, self.job.captioner)
        except ValueError:
            self.report.failed.append(example.name)
            return None
        self.interrupted()
        text = self.job.captioner.caption(image)
        if not text:
            self.report.empty.append(example.name)
            return None
        write_atomically(file, lambda unfinished: _write_text(unfinished, text))
        return text

    def _joined(self, before: str | None, text: str) -> str:
        """Add a caption to the one that is there, if asked for, and the trigger words if it lacks them."""
        if self.job.existing == APPEND and before and text not in before:
            text = f"{before}{' ' if before[-1] in '.!?' else ', '}{text}"
        elif self.job.existing == APPEND and before:
            text = before
        return self.job.style.with_trigger(text)


def _write_text(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


def _read_picture(path: Path, name: str, digest: str, captioner: Captioner) -> Tensor:
    """Decode a picture as large as a model sees it: (1, H, W, 3) in 0 to 1. Raises ValueError if it isn't readable."""
    height, width = inspect_image(path, name).size
    model_size = captioner.size(height, width)
    return load_image(path, (0, 0, width, height), *model_size, digest=digest, name=name)

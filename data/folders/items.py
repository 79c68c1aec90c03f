"""Items to train on: each image, and each clip of a video, with its size and frames."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...common.progress import Interrupted, Progress
from ...common.text import quantity, shortlist
from ..captions.variants import CaptionVariants
from ..media.clip_windows import Extraction, round_down_frames
from ..media.frames import ImagePixels, Pixels, VideoPixels
from ..media.images import inspect_image
from ..media.masks import Mask, check_alpha, find_mask
from ..media.remarks import remark_notes
from ..media.videos import VideoFacts, inspect_video
from .dataset import Dataset, ImageEntry, VideoEntry
from .options import UNCHANGED, FolderOptions


@dataclass(frozen=True)
class Item:
    """One image or clip to be encoded.

    name: name in messages.
    caption: its caption, the first of `variants`.
    repeats: showings per epoch.
    pixels: frames of the file.
    controls: control images of an edit model.
    mask: weights of its parts in the loss.
    options: options of its folder.
    file: video file that it was taken from; empty if `name` is the file.
    variants: caption variants; None for a single caption.
    frame_rate: frames per second of a clip; 0 for an image.
    folder: index of its folder among the chained ones.
    """

    name: str
    caption: str
    repeats: int
    pixels: Pixels
    controls: tuple[Pixels, ...] = ()
    mask: Mask | None = None
    options: FolderOptions = UNCHANGED
    file: str = ""
    variants: CaptionVariants | None = None
    frame_rate: float = 0.0
    folder: int = 0

    @property
    def caption_variants(self) -> CaptionVariants:
        """Caption variants, with a single one for a single caption."""
        return self.variants or CaptionVariants((self.caption,))

    @property
    def showings_per_epoch(self) -> float:
        """Mean number of its showings per epoch."""
        return self.repeats * self.options.sample_ratio


def find_items(
    dataset: Dataset, progress: Progress, interrupted: Interrupted
) -> tuple[tuple[Item, ...], tuple[str, ...]]:
    """Find the items of a data set in its order; returns them and notes.

    Every file is inspected, but none is decoded to its end.
    Raises ValueError for unreadable files, and for videos too short for any requested clip.
    """
    items: list[Item] = []
    short: list[tuple[VideoEntry, int]] = []
    lacking: dict[int, list[str]] = {}
    slow: list[str] = []
    remarks: list[tuple[str, tuple[str, ...]]] = []
    noun = "clips" if all(isinstance(entry, VideoEntry) for entry in dataset.entries) else "pictures"
    for index, entry in enumerate(dataset.entries):
        interrupted()
        progress(index, len(dataset.entries), f"Reading {noun}: {index} of {len(dataset.entries)}")
        if isinstance(entry, ImageEntry):
            items.append(_picture(entry))
            remarks += _picture_remarks(entry)
            continue
        facts = inspect_video(entry.path, entry.name)
        stamps = facts.frames_at(entry.extraction.fps, entry.name)
        windows = entry.extraction.windows(len(stamps))
        if not windows:
            short.append((entry, len(stamps)))
        for count in entry.extraction.too_long(len(stamps)) if windows else ():
            lacking.setdefault(count, []).append(f"{entry.name} ({quantity(len(stamps), 'frame')})")
        # Five percent below still counts as equal, such as 23.976 for 24.
        if facts.fps < entry.extraction.fps * 0.95:
            slow.append(f"{entry.name} ({facts.fps:.4g})")
        remarks.append((entry.name, facts.remarks))
        for start, count in windows:
            interrupted()
            items.append(_clip(entry, facts, stamps[start : start + count], start))
    if short:
        raise ValueError(_too_short(short))
    _check_alpha(dataset.entries)
    return tuple(items), (*_film_notes(lacking, slow), *remark_notes(remarks), *_chunk_notes(dataset.entries))


def _picture(picture: ImageEntry) -> Item:
    """Make the item of an image file."""

    def pixels(path: Path, name: str, opaque: bool = False) -> ImagePixels:
        facts = inspect_image(path, name)
        return ImagePixels(path, name, facts.digest, facts.size, opaque, facts.wide)

    controls = tuple(pixels(path, f"{path.name} (control)") for path in picture.controls)
    alpha = picture.options.alpha_mask
    image = pixels(picture.path, picture.name, opaque=alpha)
    mask = find_mask(picture.path, picture.mask, picture.name, image.size) if alpha or picture.mask else None
    options = picture.options
    variants = picture.variants
    folder = picture.folder
    return Item(
        picture.name, picture.caption, picture.repeats, image, controls, mask, options, variants=variants, folder=folder
    )


def _picture_remarks(picture: ImageEntry) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name and the remarks of an image file and of its control images."""
    yield picture.name, inspect_image(picture.path, picture.name).remarks
    for path in picture.controls:
        name = f"{path.name} (control)"
        yield name, inspect_image(path, name).remarks


def _clip(film: VideoEntry, facts: VideoFacts, stamps: Sequence[int], start: int) -> Item:
    """Make the item of one clip of a video: the frames with these time stamps, from frame `start` on."""
    frame_range = f"frame {start + 1}" if len(stamps) == 1 else f"frames {start + 1} to {start + len(stamps)}"
    name = f"{film.name}, {frame_range}"
    mask = find_mask(film.path, film.mask, film.name, facts.size) if film.mask else None
    pixels = VideoPixels(film.path, name, facts, tuple(stamps))
    rate = (film.extraction.fps or facts.fps) if len(stamps) > 1 else 0.0
    return Item(
        name,
        film.caption,
        film.repeats,
        pixels,
        (),
        mask,
        film.options,
        file=film.name,
        variants=film.variants,
        frame_rate=rate,
        folder=film.folder,
    )


def _check_alpha(entries: Sequence[ImageEntry | VideoEntry]) -> None:
    """Check that all images of folders with alpha_mask have an alpha channel."""
    masked = [entry for entry in entries if isinstance(entry, ImageEntry) and entry.options.alpha_mask]
    check_alpha([entry.name for entry in masked if not inspect_image(entry.path, entry.name).alpha], len(masked))


def _too_short(short: list[tuple[VideoEntry, int]]) -> str:
    """Message for videos that are too short: one sentence for each extraction, as folders may differ."""
    ways: dict[Extraction, list[tuple[VideoEntry, int]]] = {}
    for film, frames in short:
        ways.setdefault(film.extraction, []).append((film, frames))
    return " ".join(_too_short_for(extraction, films) for extraction, films in ways.items())


def _too_short_for(extraction: Extraction, films: list[tuple[VideoEntry, int]]) -> str:
    rate = f" at {extraction.fps:g} frame{'s' if extraction.fps != 1 else ''} per second" if extraction.fps else ""
    names = [f"{film.name} ({quantity(frames, 'frame')})" for film, frames in films]
    return (
        f"Shorter than the {min(extraction.target_frames)} frames asked for{rate}: "
        f"{shortlist(names)}; put "
        f"{round_down_frames(min(frames for _, frames in films))} into target_frames (such as 1, 25), or take what is "
        f"too short out of the folder."
    )


def _film_notes(lacking: dict[int, list[str]], slow: list[str]) -> Iterator[str]:
    for count, names in sorted(lacking.items()):
        yield f"Too short for a clip of {count} frames: {shortlist(names)}."
    if slow:
        yield (
            f"These have fewer frames per second than fps asks for, so frames are repeated: {shortlist(slow)}; set "
            "fps to 0 to use them as they are."
        )


def _chunk_notes(entries: Sequence[ImageEntry | VideoEntry]) -> Iterator[str]:
    extractions = [entry.extraction for entry in entries if isinstance(entry, VideoEntry)]
    if any(extraction.method == "chunk" and 1 in extraction.target_frames for extraction in extractions):
        yield "chunk with 1 in target_frames takes every frame of every clip as a picture."

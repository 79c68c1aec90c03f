"""Parts of a data set that are read alike, as a folder's layout says."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...common.untrusted.budgets import CAPTION_FILE, check_size
from .captions import CaptionFiles, CaptionSource
from .files import relative_name


@dataclass(frozen=True)
class Example:
    """One picture or clip of a layout.

    path: its file.
    name: name in messages, its path below the chosen folder.
    caption: place of its caption; None if there is none.
    mask: image of the weights of its parts in the loss.
    controls: control images of an edit model, in their order.
    """

    path: Path
    name: str
    caption: CaptionSource | None
    mask: Path | None = None
    controls: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Subset:
    """Examples that share their options.

    name: its folder in messages.
    examples: pictures or clips with their captions, masks and control images.
    repeats: factor of the folder node's repeats.
    trigger: words of the layout that replace `[trigger]` in captions, or come first in those without them.
    prefix: text in front of each caption.
    suffix: text after each caption.
    treatment: values of the layout by field of FolderOptions.
    captions: values of the layout by field of CaptionOptions.
    extraction: values of the layout by field of Extraction.
    """

    name: str
    examples: tuple[Example, ...]
    repeats: int = 1
    trigger: str = ""
    prefix: str = ""
    suffix: str = ""
    treatment: Mapping[str, Any] = field(default_factory=dict)
    captions: Mapping[str, Any] = field(default_factory=dict)
    extraction: Mapping[str, Any] = field(default_factory=dict)

    def caption_text(self, text: str) -> str:
        """Add what the layout adds to the text of a caption. Raises OverBudget for a text that becomes too long."""
        if self.trigger:
            longer = text.count("[trigger]") * len(self.trigger)
            check_size(CAPTION_FILE, "A caption with its [trigger] replaced", bytes=len(text) + longer)
            text = text.replace("[trigger]", self.trigger)
            text = text if self.trigger in text else ", ".join(filter(None, (self.trigger, text.strip())))
        return f"{self.prefix}{text.strip()}{self.suffix}" if self.prefix or self.suffix else text


@dataclass(frozen=True)
class Pictures:
    """Files of a folder that are trained on, with the files beside them.

    files: pictures or clips, in order.
    masks: mask image by file.
    controls: control images in their order, by file.
    """

    files: tuple[Path, ...]
    masks: Mapping[Path, Path] = field(default_factory=dict)
    controls: Mapping[Path, tuple[Path, ...]] = field(default_factory=dict)

    def examples(
        self, root: Path, caption: Callable[[Path], CaptionSource | None], files: Sequence[Path] | None = None
    ) -> tuple[Example, ...]:
        """Make the examples of the files, or of some of them.

        root: folder below which they are named.
        caption: place of the caption of a file.
        """
        return tuple(
            Example(file, relative_name(root, file), caption(file), self.masks.get(file), self.controls.get(file, ()))
            for file in (self.files if files is None else files)
        )


def own_captions(captions: CaptionFiles, default: str = "") -> Callable[[Path], CaptionSource | None]:
    """Make the function that finds the caption beside a file. default: caption of those without, if it isn't empty."""
    fallback = CaptionSource(text=default) if default else None
    return lambda file: captions.find(file) or fallback

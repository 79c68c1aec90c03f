"""Images of a folder that the user leaves out, by name."""

from dataclasses import replace

from ...common.text import quantity, shortlist
from ...common.untrusted.budgets import LEAVE_OUT, check_size
from ..layouts.layout import FolderLayout


def names_in(text: str) -> frozenset[str]:
    """Read the names in a text, one in a line. Raises OverBudget."""
    check_size(LEAVE_OUT, "leave_out", characters=len(text))
    lines = (line.strip().replace("\\", "/") for line in text.splitlines())
    return frozenset(line for line in lines if line)


def plain(name: str) -> str:
    """Write a file's name as a text input has it, which holds no invalid characters and no space at the ends."""
    return name.encode("utf-8", "replace").decode().strip()


def without(layout: FolderLayout, text: str, folder: str, noun: str) -> FolderLayout:
    """Take the images of the text out of a layout, with a note on those that aren't there.

    folder, noun: name and contents of the folder, for messages.
    Raises ValueError if none are left.
    """
    names = names_in(text)
    if not names:
        return layout
    present = {plain(example.name) for subset in layout.subsets for example in subset.examples}
    subsets = tuple(
        replace(subset, examples=tuple(example for example in subset.examples if plain(example.name) not in names))
        for subset in layout.subsets
    )
    subsets = tuple(subset for subset in subsets if subset.examples)
    if not subsets:
        raise ValueError(
            f"leave_out names every {noun} of the folder {folder!r}, so there is nothing to train on; take some out."
        )
    count = len(names & present)
    total = len(present)
    left_out = quantity(count, f"{noun} of {total} is", f"{noun}s of {total} are")
    notes = [f"{left_out} left out by leave_out."] if count else []
    absent = sorted(names - present)
    if absent:
        notes.append(f"leave_out names files that the folder {folder!r} doesn't hold: {shortlist(absent)}.")
    return replace(layout, subsets=subsets, notes=(*notes, *layout.notes))

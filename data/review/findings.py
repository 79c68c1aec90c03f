"""Findings of a check: the faults of each picture."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...common.text import cut, quantity

BROKEN = "broken"
DOUBLE = "double"
BLURRED = "blurred"
ENLARGED = "enlarged"
SMALL = "small"
PICTURE_FAULTS = (BROKEN, DOUBLE, BLURRED, ENLARGED, SMALL)
BORDER = "border"
COLOURS = "colours"
NO_CAPTION = "no caption"
EMPTY = "empty caption"
EQUAL = "equal captions"
LONG = "long caption"
NO_TRIGGER = "no trigger words"
OTHER_FAULTS = (BORDER, COLOURS, NO_CAPTION, EMPTY, EQUAL, LONG, NO_TRIGGER)
TITLES = {
    BROKEN: "Can't be read",
    DOUBLE: "Near-doubles",
    BLURRED: "Blurred, or enlarged without a trace",
    ENLARGED: "Enlarged",
    SMALL: "Small, so that training enlarges them",
    BORDER: "With a border of one colour",
    COLOURS: "Read otherwise than they look",
    NO_CAPTION: "Without a caption, or with one that can't be read",
    EMPTY: "With an empty caption",
    EQUAL: "With equal captions",
    LONG: "With a caption that is longer than the text encoder takes",
    NO_TRIGGER: "Without the trigger words in the caption",
}
_MOST_NAMED = 20  # pictures of a fault that the report names


@dataclass(frozen=True)
class Finding:
    """One fault of a picture.

    name: its path below the folder.
    fault: one of PICTURE_FAULTS and OTHER_FAULTS.
    detail: what exactly, in a few words.
    leave_out: whether training is better without the picture.
    """

    name: str
    fault: str
    detail: str = ""
    leave_out: bool = False


def report(count: int, findings: Sequence[Finding], notes: Iterable[str] = ()) -> str:
    """Write the report: a line on all pictures, then one for each kind of fault with the pictures that have it."""
    names = {finding.name for finding in findings}
    lines = [f"{quantity(count, 'picture')}, {f'{len(names)} with a finding' if names else 'nothing found'}."]
    for fault, title in TITLES.items():
        found = [finding for finding in findings if finding.fault == fault]
        if found:
            rest = len(found) - _MOST_NAMED
            listed = ", ".join(map(_text, found[:_MOST_NAMED])) + (f" and {rest} more" if rest > 0 else "")
            lines.append(f"{title} ({len(found)}): {listed}")
    return "\n".join([*lines, *notes])


def _text(finding: Finding) -> str:
    return f"{cut(finding.name)} ({finding.detail})" if finding.detail else cut(finding.name)


def left_out(findings: Iterable[Finding]) -> str:
    """List the pictures that training is better without, one name in a line."""
    return "\n".join(dict.fromkeys(finding.name for finding in findings if finding.leave_out))

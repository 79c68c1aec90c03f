"""How messages list names."""

from collections.abc import Sequence

_NAMED = 5  # how many files a message lists before it only counts the rest


def shortlist(names: Sequence[str]) -> str:
    """Up to five names for a message, and how many more there are."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def joined(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last

"""Options without effect: declared at their dataclass field, told by one function."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Unread:
    """A condition under which an option is not read.

    when: the condition, over the options.
    reason: the end of the sentence "<name> is not used", with names of options in braces for their values.
    subject: what the sentence names, where that is not the option's name alone.
    joined: options of one reason share a sentence.
    """

    when: Callable[[Any], bool]
    reason: str
    subject: str = ""
    joined: bool = False


def option(default: T, *unread: Unread) -> T:
    """Declare a dataclass field with what makes it unread; the first condition that holds is told."""
    # Typed as its default, as dataclasses.field itself is.
    return field(default=default, metadata={"unread": unread})  # type: ignore[return-value]


def read_by(reader: str, *choices: str) -> Unread:
    """Declare an option to belong to some choices of another option."""
    reason = f": it belongs to {reader} {' or '.join(choices)}, which is {{{reader}}}."
    return Unread(lambda options: getattr(options, reader) not in choices, reason)


def unread_notes(options: Any) -> Iterator[str]:
    """Yield a sentence for each option that was changed from its default and is not read.

    options: a dataclass whose fields are declared with `option`.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for each in fields(options):
        if getattr(options, each.name) != each.default:
            unread = next((one for one in each.metadata.get("unread", ()) if one.when(options)), None)
            if unread is not None:
                subject = unread.subject or each.name
                names = found.setdefault(("" if unread.joined else subject, unread.reason), [])
                names += [subject] if subject not in names else []
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    for (_, reason), names in found.items():
        named = " and ".join(names).format(**values)
        yield f"{named} {'are' if ' and ' in named else 'is'} not used{reason.format(**values)}"

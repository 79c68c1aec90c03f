"""Options without effect: declared at their dataclass field, reported by `unread_notes`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Unread:
    """Condition under which an option is not read.

    condition: function of the options.
    reason: the end of the sentence "<name> is not used", with names of options in braces for their values.
    subject: subject of the sentence, if not the option's name alone.
    joined: options with the same reason share a sentence.
    """

    condition: Callable[[Any], bool]
    reason: str
    subject: str = ""
    joined: bool = False


def option(default: T, *unread: Unread) -> T:
    """Declare a dataclass field with the conditions that make it unread; the first that holds is reported."""
    # Typed as its default, as dataclasses.field itself is.
    return field(default=default, metadata={"unread": unread})  # type: ignore[return-value]


def read_by(reader: str, *choices: str) -> Unread:
    """Declare that an option is read only for these choices of another option."""
    reason = f": it belongs to {reader} {' or '.join(choices)}, which is {{{reader}}}."
    return Unread(lambda options: getattr(options, reader) not in choices, reason)


def unread_notes(options: Any) -> Iterator[str]:
    """Yield a sentence for each option that differs from its default and is not read.

    options: a dataclass whose fields are declared with `option`.
    """
    names_by_reason: dict[tuple[str, str], list[str]] = {}
    for option_field in fields(options):
        if getattr(options, option_field.name) != option_field.default:
            unread = next((rule for rule in option_field.metadata.get("unread", ()) if rule.condition(options)), None)
            if unread is not None:
                subject = unread.subject or option_field.name
                names = names_by_reason.setdefault(("" if unread.joined else subject, unread.reason), [])
                names += [subject] if subject not in names else []
    values = {option_field.name: getattr(options, option_field.name) for option_field in fields(options)}
    for (_, reason), names in names_by_reason.items():
        subjects = " and ".join(names).format(**values)
        yield f"{subjects} {'are' if ' and ' in subjects else 'is'} not used{reason.format(**values)}"

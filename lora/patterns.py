"""Which layers get an adapter: glob patterns over module names."""

from collections.abc import Sequence
from fnmatch import fnmatchcase


def parse_targets(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(include, exclude) from one pattern per line; a line that starts with `-` or `!` excludes.

    Empty lines are skipped. Nothing to include stands for the model family's defaults.
    """
    include: list[str] = []
    exclude: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line:
            continue
        excludes = line[0] in "-!"
        pattern = line[1:].strip() if excludes else line
        if not pattern:
            raise ValueError(
                f"Line {number} of targets is {line!r} with no pattern after it; write one, as in '-*.img_mlp.*', "
                "or remove the line."
            )
        (exclude if excludes else include).append(pattern)
    return tuple(include), tuple(exclude)


def match_targets(names: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """The names, in their order, that a pattern of `include` matches and none of `exclude` does.

    Patterns are those of `fnmatch`, case-sensitive; `*` also runs across dots. The caller fills an empty `include`
    with the family's defaults before. A pattern without a match is an error: it is a slip of the pen, and a LoRA on
    other layers than meant is found out only after hours.
    """
    assert names and include, (len(names), include)
    for pattern in (*include, *exclude):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"The pattern {pattern!r} in targets matches no layer of this model; its layers have names such as "
                f"{examples(names)}."
            )
    chosen = [
        name
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in include)
        and not any(fnmatchcase(name, pattern) for pattern in exclude)
    ]
    if not chosen:
        raise ValueError(
            f"targets excludes every layer that it includes ({', '.join(exclude)} covers {', '.join(include)}); "
            "remove or narrow a line that starts with '-' or '!'."
        )
    return chosen


def examples(names: Sequence[str]) -> str:
    """Up to three names, from the start, the middle and the end."""
    places = sorted({0, len(names) // 2, len(names) - 1})
    return ", ".join(names[place] for place in places)

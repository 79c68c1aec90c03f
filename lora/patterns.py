"""Glob patterns over module names: the layers that get an adapter, and ranks and alphas of some of them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..common.text import quoted
from ..common.untrusted.budgets import LAYER_PATTERNS, PATTERN, check_size

RankAlpha = tuple[int, float]
_EXAMPLE = "'single_blocks.*: rank=8 alpha=4'"


def parse_targets(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Parse one pattern per line into (include, exclude); a line that starts with `-` or `!` excludes.

    Empty lines are skipped. An empty include selects the model family's defaults. Raises ValueError for a line without
    a pattern, OverBudget for more of them than a model can need.
    """
    include: list[str] = []
    exclude: list[str] = []
    for number, line in _lines(text, "targets"):
        excludes = line[0] in "-!"
        pattern = line[1:].strip() if excludes else line
        if not pattern:
            raise ValueError(
                f"Line {number} of targets is {quoted(line)} with no pattern after it; write one, as in "
                "'-*.img_mlp.*', or remove the line."
            )
        (exclude if excludes else include).append(pattern)
    return tuple(include), tuple(exclude)


def _lines(text: str, name: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that aren't empty, with their numbers from 1. name: input of the text."""
    lines = text.splitlines()
    check_size(LAYER_PATTERNS, name, characters=len(text), items=len(lines))
    for number, line in enumerate(map(str.strip, lines), start=1):
        if line:
            check_size(PATTERN, f"Line {number} of {name}", items=line.count("*"))
            yield number, line


def match_targets(
    names: Sequence[str], include: Sequence[str], exclude: Sequence[str], second: Sequence[str] = ()
) -> list[str]:
    """List the names, in order, that match a pattern of `include` and none of `exclude`, followed by those of `second`.
    A pattern of `include` applies to `second` only if it matches none of `names`.

    Patterns are those of `fnmatch`, case-sensitive; `*` also spans dots. The caller replaces an empty `include` by the
    family's defaults. Raises ValueError for a pattern without a match: it is a typo, and a LoRA on the wrong layers is
    noticed only after hours.
    """
    assert names and include, (len(names), include)
    for pattern in (*include, *exclude):
        if not any(fnmatchcase(name, pattern) for name in (*names, *second)):
            if "," in pattern:
                raise ValueError(
                    f"The pattern {quoted(pattern)} in targets matches no layer, because it has a comma; write one "
                    "pattern per line."
                )
            raise ValueError(
                f"The pattern {quoted(pattern)} in targets matches no layer of this model; its layers have "
                f"names such as {examples(names)}."
            )
    unmatched = [pattern for pattern in include if not any(fnmatchcase(name, pattern) for name in names)]
    targets = [
        name
        for group, patterns in ((names, include), (second, unmatched))
        for name in group
        if any(fnmatchcase(name, pattern) for pattern in patterns)
        and not any(fnmatchcase(name, pattern) for pattern in exclude)
    ]
    if not targets:
        raise ValueError(
            f"targets excludes every layer that it includes ({', '.join(exclude)} covers {', '.join(include)}); "
            "remove or narrow a line that starts with '-' or '!'."
        )
    return targets


def examples(names: Sequence[str]) -> str:
    """List up to three names, from the start, the middle and the end."""
    places = sorted({0, len(names) // 2, len(names) - 1})
    return ", ".join(names[place] for place in places)


@dataclass(frozen=True)
class RankPattern:
    """A line of rank_patterns.

    pattern: glob pattern of the names of its layers.
    rank: rank of these layers; None leaves theirs.
    alpha: alpha of these layers; None leaves their alpha / rank.
    """

    pattern: str
    rank: int | None = None
    alpha: float | None = None

    def applied(self, values: RankAlpha) -> RankAlpha:
        """Apply the line to a matching layer's rank and alpha; a rank without an alpha keeps alpha / rank."""
        rank_before, alpha = values
        rank = rank_before if self.rank is None else self.rank
        return rank, alpha * rank / rank_before if self.alpha is None else self.alpha


def parse_rank_patterns(text: str) -> tuple[RankPattern, ...]:
    """Parse lines of a pattern, a colon, and `rank=` or `alpha=` or both. Empty lines are skipped; raises ValueError
    for any other."""
    patterns = []
    for number, line in _lines(text, "rank_patterns"):
        pattern, _, settings = (part.strip() for part in line.partition(":"))
        values = dict(part.partition("=")[::2] for part in settings.split())
        if not pattern or not values or not values.keys() <= {"rank", "alpha"}:
            raise ValueError(f"Line {number} of rank_patterns is {quoted(line)}; write it as in {_EXAMPLE}.")
        patterns.append(RankPattern(pattern, _rank(values, number), _alpha(values, number)))
    return tuple(patterns)


def match_rank_patterns(lines: Sequence[RankPattern], targets: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return each target's matching lines, by number and in order. Raises ValueError for a line that matches none."""
    matching: dict[str, list[int]] = {name: [] for name in targets}
    for number, line in enumerate(lines):
        names = [name for name in targets if fnmatchcase(name, line.pattern)]
        if not names:
            raise ValueError(
                f"The pattern {quoted(line.pattern)} in rank_patterns matches no layer that is trained; they "
                f"have names such as {examples(targets)}."
            )
        for name in names:
            matching[name].append(number)
    return {name: tuple(numbers) for name, numbers in matching.items()}


def rank_and_alpha(lines: Sequence[RankPattern], numbers: Iterable[int], start: RankAlpha) -> RankAlpha:
    """Apply the lines of these numbers in order, each to the result of the previous ones."""
    for number in numbers:
        start = lines[number].applied(start)
    return start


def _rank(values: dict[str, str], line: int) -> int | None:
    if "rank" not in values:
        return None
    # At most nine digits: Python's int() rejects more than 4300.
    if not re.fullmatch(r"[0-9]{1,9}", values["rank"]) or int(values["rank"]) < 1:
        raise ValueError(
            f"Line {line} of rank_patterns has the rank {quoted(values['rank'])}; give a whole number from 1."
        )
    return int(values["rank"])


def _alpha(values: dict[str, str], line: int) -> float | None:
    if "alpha" not in values:
        return None
    try:
        alpha = float(values["alpha"])
    except ValueError:
        alpha = 0.0
    if not 0 < alpha < float("inf"):
        raise ValueError(
            f"Line {line} of rank_patterns has the alpha {quoted(values['alpha'])}; give a number above 0."
        )
    return alpha

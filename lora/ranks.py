"""Ranks and alphas of some layers, by pattern."""

from dataclasses import dataclass

_EXAMPLE = "'single_blocks.*: rank=8 alpha=4'"


@dataclass(frozen=True)
class RankPattern:
    """What the layers that match `pattern` have of their own; a rank without an alpha keeps alpha / rank."""

    pattern: str
    rank: int | None = None
    alpha: float | None = None


def parse_rank_patterns(text: str) -> tuple[RankPattern, ...]:
    """One line each: a pattern, a colon, `rank=` or `alpha=` or both. Empty lines are skipped."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        pattern, _, settings = (part.strip() for part in line.partition(":"))
        values = dict(part.partition("=")[::2] for part in settings.split())
        if not pattern or not values or not values.keys() <= {"rank", "alpha"}:
            raise ValueError(f"Line {number} of rank_patterns is {line.strip()!r}; write it as in {_EXAMPLE}.")
        found.append(RankPattern(pattern, _rank(values, number), _alpha(values, number)))
    return tuple(found)


def _rank(values: dict[str, str], line: int) -> int | None:
    if "rank" not in values:
        return None
    if not values["rank"].isdecimal() or int(values["rank"]) < 1:
        raise ValueError(f"Line {line} of rank_patterns has the rank {values['rank']!r}; give a whole number from 1.")
    return int(values["rank"])


def _alpha(values: dict[str, str], line: int) -> float | None:
    if "alpha" not in values:
        return None
    try:
        alpha = float(values["alpha"])
    except ValueError:
        alpha = 0.0
    if not 0 < alpha < float("inf"):
        raise ValueError(f"Line {line} of rank_patterns has the alpha {values['alpha']!r}; give a number above 0.")
    return alpha

"""Rows in which every pair of options occurs: most faults need one option or two, hardly any needs three.

A greedy covering array, as in Cohen, Dalal, Fredman and Patton, "The AETG System" (1997), without chance: the same
options give the same rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

Options = Mapping[str, Sequence[str]]
Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]
Excludes = Callable[[Row], bool]
"""Return whether a row, of some or all options, is impossible; adding options never makes it possible again."""

TRIES = 24  # pairs that a row is started from; the best row is kept


def pairs_of(row: Row) -> Iterator[Pair]:
    """All pairs of a row, the options in its order."""
    yield from combinations(row.items(), 2)


def possible_pairs(options: Options, excludes: Excludes) -> list[Pair]:
    """Return the pairs that some row can hold."""
    pairs = []
    for first, second in combinations(options, 2):
        for a in options[first]:
            for b in options[second]:
                if _completed({first: a, second: b}, options, excludes, {}) is not None:
                    pairs.append(((first, a), (second, b)))
    return pairs


def covering_rows(
    options: Options, excludes: Excludes, first: Sequence[Row] = (), graph: Sequence[str] = ()
) -> list[Row]:
    """Return rows that cover every possible pair, those with the most new pairs first.

    options: the values of each, the default first, which is used if no value covers more pairs.
    first: rows, in part or whole, that come first; missing values are filled in.
    graph: options that change the compiled graphs; of two equally good rows, one with known graphs is taken.
    """
    missing = dict.fromkeys(possible_pairs(options, excludes))
    rows: list[Row] = []
    for start in first:
        row = _completed(dict(start), options, excludes, missing)
        if row is None:
            raise ValueError(f"No row can hold {start}.")
        _take(row, rows, missing)
    while missing:
        graphs = {tuple(row[name] for name in graph) for row in rows}
        starts = list(missing)[:: max(1, len(missing) // TRIES)]
        completed = [_completed(dict(pair), options, excludes, missing) for pair in starts]
        candidates = [row for row in completed if row is not None]
        best = max(candidates, key=lambda row: (_gain(row, missing), tuple(row[name] for name in graph) in graphs))
        _take(best, rows, missing)
    return rows


def _take(row: Row, rows: list[Row], missing: dict[Pair, None]) -> None:
    rows.append(row)
    for pair in pairs_of(row):
        missing.pop(pair, None)


def _gain(row: Row, missing: Mapping[Pair, None]) -> int:
    return sum(pair in missing for pair in pairs_of(row))


def _completed(row: Row, options: Options, excludes: Excludes, missing: Mapping[Pair, None]) -> Row | None:
    """Fill in the other options of a row, in the order of `options`, with the value that covers the most missing pairs
    at each step. Return None if there is no such row."""
    if excludes(row):
        return None
    open_options = [name for name in options if name not in row]
    if not open_options:
        return {name: row[name] for name in options}
    name = open_options[0]
    order = {option: number for number, option in enumerate(options)}

    def gain(value: str) -> int:
        pairs = (sorted(((name, value), other), key=lambda item: order[item[0]]) for other in row.items())
        return sum((first, second) in missing for first, second in pairs)

    for value in sorted(options[name], key=lambda value: -gain(value)):
        completed = _completed({**row, name: value}, options, excludes, missing)
        if completed is not None:
            return completed
    return None

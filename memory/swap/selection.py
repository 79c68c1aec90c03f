"""Selection of the blocks to swap."""

from collections.abc import Mapping, Sequence


def choose_blocks(count: int, lists: Mapping[str, int], order: Sequence[str]) -> frozenset[str]:
    """Choose the names of `count` blocks to swap, such as single_blocks.3.

    lists: the model's lists of blocks with their lengths.
    order: the lists in the order in which they are to be used.
    Raises ValueError for more blocks than there are.
    """
    check_count(count, sum(lists.values()))
    return evenly_spaced(count, [[f"{name}.{i}" for i in range(lists[name])] for name in order])


def check_count(count: int, total: int) -> None:
    """Raise ValueError for more blocks than there are."""
    if not 0 <= count <= total:
        raise ValueError(f"blocks_to_swap is {count}; this model has {total} blocks, so choose 0 to {total}.")


def all_on_device(prefetch: int, swapped: int) -> str | None:
    """Return a sentence where so many blocks are copied ahead that each of those that are swapped has a slot."""
    if prefetch + 1 < swapped:
        return None
    return (
        f"prefetch_blocks is {prefetch} with {swapped} swapped blocks, so all of them are on the GPU and nothing is "
        "saved; choose a smaller prefetch_blocks or more blocks_to_swap."
    )


def evenly_spaced(count: int, groups: Sequence[Sequence[str]]) -> frozenset[str]:
    """Choose `count` of the names: all of the first groups, and of the last one that is used some, evenly spaced.

    So each copy has resident blocks to overlap with.
    """
    chosen: set[str] = set()
    for names in groups:
        taken = min(len(names), count - len(chosen))
        chosen |= {names[(2 * i + 1) * len(names) // (2 * taken)] for i in range(taken)}
    return frozenset(chosen)

"""Select the blocks to swap."""

from collections.abc import Mapping, Sequence

from ...common.text import quantity


def choose_blocks(count: int, lists: Mapping[str, int], order: Sequence[str]) -> frozenset[str]:
    """Choose the names of `count` blocks to swap, such as single_blocks.3.

    lists: the model's lists of blocks with their lengths.
    order: the lists in the order in which to swap them.
    Raises ValueError if `count` exceeds the number of blocks.
    """
    check_count(count, sum(lists.values()))
    return evenly_spaced(count, [[f"{name}.{i}" for i in range(lists[name])] for name in order])


def check_count(count: int, total: int) -> None:
    """Raise ValueError if `count` exceeds `total` blocks or is negative."""
    if not 0 <= count <= total:
        raise ValueError(
            f"blocks_to_swap is {count}; this model has {quantity(total, 'block')}, so choose 0 to {total}."
        )


def all_on_device(prefetch: int, swapped: int) -> str | None:
    """Return a sentence if so many blocks are prefetched that every swapped block has a slot."""
    if prefetch + 1 < swapped:
        return None
    all_text = "it is" if swapped == 1 else "all of them are"
    return (
        f"prefetch_blocks is {prefetch} with {quantity(swapped, 'swapped block')}, so {all_text} on the GPU and "
        "nothing is saved; choose a smaller prefetch_blocks or more blocks_to_swap."
    )


def evenly_spaced(count: int, groups: Sequence[Sequence[str]]) -> frozenset[str]:
    """Choose `count` names: all of the first groups, then some of the last group needed, evenly spaced.

    So each copy has resident blocks to overlap with.
    """
    selected: set[str] = set()
    for names in groups:
        group_count = min(len(names), count - len(selected))
        selected |= {names[(2 * i + 1) * len(names) // (2 * group_count)] for i in range(group_count)}
    return frozenset(selected)

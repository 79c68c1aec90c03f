"""Order of the queue: prompts without a training first, then the trainings as they came.

A queue item is a tuple `(number, prompt id, prompt, extra data, outputs, …)`; ComfyUI runs the lowest number next.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

Item = tuple[Any, ...]


def behind_others(queue: Sequence[Item], paused: Item, trains: Callable[[Item], bool]) -> list[Item]:
    """Return the queue with a paused training added behind all prompts that don't train.

    Trainings that stand before the last of these follow the paused one, in their order; only their numbers change.

    trains: returns whether an item has a training to do.
    """
    untrained = [item for item in queue if not trains(item)]
    trainings = sorted((item for item in queue if trains(item)), key=itemgetter(0, 1))
    if not untrained:
        first = min((item[0] for item in trainings), default=paused[0] + 1)
        return [*queue, (min(paused[0], first - 1), *paused[1:])]
    last = max(item[0] for item in untrained)
    behind = [paused, *(item for item in trainings if item[0] <= last)]
    remaining = [item for item in trainings if item[0] > last]
    room = min((item[0] for item in remaining), default=last + 1) - last
    numbers = [last + room * (index + 1) / (len(behind) + 1) for index in range(len(behind))]
    renumbered = [(number, *item[1:]) for number, item in zip(numbers, behind, strict=True)]
    return [*untrained, *renumbered, *remaining]


def reordered(queue: Sequence[Item], prompt_ids: Sequence[str]) -> list[Item]:
    """Return the queue with the items of `prompt_ids` in that order, on the places that they hold together."""
    by_id = {item[1]: item for item in queue}
    listed = [by_id[id] for id in prompt_ids if id in by_id]
    numbers = sorted(item[0] for item in listed)
    renumbered = {item[1]: (number, *item[1:]) for number, item in zip(numbers, listed, strict=True)}
    return [renumbered.get(item[1], item) for item in queue]

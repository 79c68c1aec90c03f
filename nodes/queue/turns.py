"""Turns of Train LoRA in ComfyUI's queue: a run pauses for prompts that wait, and is queued again behind them.

A paused run has saved its state, ends its prompt without an error, and goes on in a copy of the prompt. All of this is
held in memory: a server that was restarted has an empty queue too.
"""

import heapq
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, TypeVar

from comfy.model_management import InterruptProcessingException, throw_exception_if_processing_interrupted
from server import PromptServer

from .order import Item, behind_others, reordered
from .prompts import outputs_behind, signature, training_nodes

FINISH_FIRST, LET_PASS = "finish first", "let them pass"
MINUTES = 5.0  # default of the least time between two pauses
MOST_LETTERS = 200  # of an output name that is listed
_MOST_KEPT = 1000  # trainings and pauses that are remembered

T = TypeVar("T")


@dataclass(frozen=True)
class Pause:
    """The pauses so far of a training that a queued prompt goes on with.

    previous: id of the prompt that paused last.
    count: number of pauses.
    passed: prompts that went first, in all pauses.
    saving: seconds from the wish for the last pause until the run had ended.
    loading: seconds from the start of the node to the first step, in the last session.
    states: last state of each paused run, as `resume` names it, by node id.
    """

    previous: str
    count: int = 0
    passed: int = 0
    saving: float = 0.0
    loading: float = 0.0
    states: dict[str, str] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """Say how often this training has paused, and what a pause costs."""
        times = "once" if self.count == 1 else f"{self.count} times"
        prompts = "1 other prompt" if self.passed == 1 else f"{self.passed} other prompts"
        seconds = self.saving + self.loading
        return f"Paused {times} for {prompts} so far; the last pause took {seconds:.1f} s of saving and loading."


class Turns:
    """Memory of the trainings in this server's queue.

    finished: signatures of trainings that ended with a LoRA, see `prompts.signature`.
    pauses: by the id of the prompt that goes on.
    following: id of the prompt that goes on, by the id of the paused one.
    stopped: queue items that the user paused without a turn to come, by the paused prompt's id.
    """

    def __init__(self) -> None:
        self.finished: OrderedDict[str, None] = OrderedDict()
        self.pauses: OrderedDict[str, Pause] = OrderedDict()
        self.following: OrderedDict[str, str] = OrderedDict()
        self.stopped: OrderedDict[str, Item] = OrderedDict()

    def trains(self, item: Item) -> bool:
        """Return whether a queue item has a training to do that has not finished in this session."""
        return bool(self.unfinished(item))

    def unfinished(self, item: Item) -> set[str]:
        """Return the nodes of a queue item that have a training to do."""
        prompt, outputs = item[2], item[4]
        return {node for node in training_nodes(prompt, outputs) if signature(prompt, node) not in self.finished}


def remember(table: OrderedDict[str, T], key: str, value: T) -> None:
    """Add an entry to a table of `Turns`, and forget its oldest one if there are too many."""
    table[key] = value
    while len(table) > _MOST_KEPT:
        table.popitem(last=False)


turns = Turns()


def server_queue() -> Any:
    """Return ComfyUI's `PromptQueue`; None without a server."""
    return getattr(getattr(PromptServer, "instance", None), "prompt_queue", None)


class Turn:
    """The turn of one Train LoRA node, in one execution of its prompt.

    ahead: prompts that wait for it, when the pause was decided.
    """

    def __init__(self, mode: str, minutes: float, prompt_id: str, node_id: str):
        """mode: FINISH_FIRST or LET_PASS. minutes: least time between two pauses."""
        self._queue = server_queue()
        self.lets_pass, self._least_seconds = mode == LET_PASS, 60 * minutes
        self.prompt_id, self.node_id = prompt_id, node_id
        self.pause = turns.pauses.get(prompt_id, Pause(prompt_id))
        self.ahead = 0
        self._began = time.monotonic()
        self._first_step = self._decided = 0.0
        self._trains: dict[str, bool] = {}
        self._obey_cancel()

    @property
    def has_queue(self) -> bool:
        """False under run.py."""
        return self._queue is not None and self._item() is not None

    @property
    def is_over(self) -> bool:
        """True if another training of this prompt has paused, so that this one pauses as well."""
        return self.prompt_id in turns.following or self.prompt_id in turns.stopped

    @property
    def next_prompt_id(self) -> str:
        """Id of the prompt that goes on; empty if there is none."""
        return turns.following.get(self.prompt_id, "")

    def finish_first(self) -> None:
        """Let no other prompt pass from now on, since this training can't pause."""
        self.lets_pass = False

    def gives_way(self) -> bool:
        """Return whether to pause before the first step: others wait, and this training has not waited for any yet."""
        return self.lets_pass and not self.pause.count and self._are_others_waiting()

    def is_due(self) -> bool:
        """Return whether to pause now, between two steps."""
        moment = time.monotonic()
        self._first_step = self._first_step or moment
        if not self.lets_pass or (self.pause.count and moment - self._first_step < self._least_seconds):
            return False
        return self._are_others_waiting()

    def resume(self, setting: str) -> str:
        """Return the `resume` setting: after a pause, 'off' or a named state would begin again there."""
        return setting if setting == "latest" else self.pause.states.get(self.node_id, setting)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the pauses so far."""
        return (self.pause.note,) if self.pause.count else ()

    def record_finished(self) -> None:
        """Record that this training has ended with a LoRA, so that prompts that use it pass other trainings."""
        if self._queue is not None and (item := self._item()) is not None and self.node_id in item[2]:
            remember(turns.finished, signature(item[2], self.node_id), None)

    def _are_others_waiting(self) -> bool:
        if self._queue is None:
            return False
        waiting = self._queue.get_current_queue_volatile()[1]
        for item in waiting:
            if item[1] not in self._trains:
                self._trains[item[1]] = turns.trains(item)
        self.ahead = sum(not self._trains[item[1]] for item in waiting)
        self._decided = time.monotonic()
        return self.ahead > 0

    def _item(self) -> Item | None:
        """Return this prompt's item of the queue, as it was before its execution."""
        running = self._queue.get_current_queue_volatile()[0]
        return next((item for item in running if item[1] == self.prompt_id), None)

    def follow(self, state: str = "") -> None:
        """Make the prompt that goes on, with the outputs that unfinished trainings are needed for.

        It is queued behind the prompts that wait; if none did, as the user paused the run, it is held for `go_on`.

        state: the run's last state, as `resume` names it; empty if it has none.

        Raises InterruptProcessingException if the user has cancelled meanwhile.
        """
        throw_exception_if_processing_interrupted()
        queue = self._queue
        with queue.mutex:
            item = self._item()
            assert item is not None
            id, moment = str(uuid.uuid4()), time.monotonic()
            outputs = outputs_behind(item[2], item[4], turns.unfinished(item))
            following = (item[0], id, item[2], item[3], outputs, *item[5:])
            pause = replace(
                self.pause,
                previous=self.prompt_id,
                count=self.pause.count + 1,
                passed=self.pause.passed + self.ahead,
                saving=moment - (self._decided or moment),
                loading=max(0.0, self._first_step - self._began),
                states=self.pause.states | ({self.node_id: state} if state else {}),
            )
            remember(turns.pauses, id, pause)
            remember(turns.stopped, self.prompt_id, following)
            if self.ahead:
                go_on(self.prompt_id)

    def _obey_cancel(self) -> None:
        """Raise if the paused prompt was cancelled after it had been queued again."""
        if self._queue is None or self.prompt_id not in turns.pauses:
            return
        entry = self._queue.get_history(prompt_id=self.pause.previous).get(self.pause.previous) or {}
        messages = (entry.get("status") or {}).get("messages", ())
        if any(message[0] == "execution_interrupted" for message in messages):
            raise InterruptProcessingException


def change_queue(change: Callable[[list[Item]], list[Item]]) -> None:
    """Replace the waiting items of ComfyUI's queue, and tell its worker and its pages.

    change: returns the new items for those that wait.
    """
    queue = server_queue()
    with queue.mutex:
        queue.queue[:] = change(queue.queue)
        heapq.heapify(queue.queue)
        queue.not_empty.notify()
        queue.server.queue_updated()


def go_on(prompt_id: str) -> str:
    """Queue a prompt again that the user has paused. Returns the id of the prompt that goes on, empty if none waits."""
    item = turns.stopped.pop(prompt_id, None)
    if item is None:
        return ""
    remember(turns.following, prompt_id, item[1])
    change_queue(lambda waiting: behind_others(waiting, item, turns.trains))
    return str(item[1])


def outlook(prompt_id: str) -> dict[str, Any]:
    """Return `next_prompt_id` of a paused prompt, empty if none is in the queue, and `ahead`, the prompts before it."""
    id, queue = turns.following.get(prompt_id, ""), server_queue()
    if not id or queue is None:
        return {"next_prompt_id": "", "ahead": 0}
    running, waiting = queue.get_current_queue_volatile()
    places = [item[:2] for item in waiting]
    target = next((place for place in places if place[1] == id), None)
    if target is None:
        return {"next_prompt_id": id if any(item[1] == id for item in running) else "", "ahead": 0}
    return {"next_prompt_id": id, "ahead": len(running) + sum(place < target for place in places)}


def line() -> list[dict[str, Any]]:
    """Return the trainings in the queue, the next first: `prompt_id`, and `names`, the output names of its runs."""
    queue = server_queue()
    waiting = [] if queue is None else sorted(queue.get_current_queue_volatile()[1], key=itemgetter(0, 1))
    trainings = [(item, turns.unfinished(item)) for item in waiting]
    return [
        {"prompt_id": item[1], "names": [_output_name(item[2][node]) for node in sorted(nodes)]}
        for item, nodes in trainings
        if nodes
    ]


def reorder(prompt_ids: Sequence[str]) -> None:
    """Give the trainings in the queue this order, on the places that they hold."""

    def change(waiting: list[Item]) -> list[Item]:
        trainings = {item[1] for item in waiting if turns.trains(item)}
        return reordered(waiting, [id for id in prompt_ids if id in trainings])

    change_queue(change)


def _output_name(node: Mapping[str, Any]) -> str:
    name = node.get("inputs", {}).get("output_name")
    return name[:MOST_LETTERS] if isinstance(name, str) else ""

"""Store of a run: the messages of its ranks, by keys of torch's key-value store."""

import json
from enum import Enum, unique
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store


@unique
class Topic(Enum):
    """Subject of a message. The keys of two topics never coincide, whatever their names are."""

    FAULT = "fault"
    """first fault of a rank, which ends all runs of the process"""
    AFTER_FIRST = "after first"
    """work that rank 0 has finished before any run, such as filling a cache"""
    GATHER = "gather"
    """values of all ranks"""
    BROADCAST = "broadcast"
    """values of rank 0"""
    BARRIER = "barrier"
    """arrivals at a barrier"""
    FINISHED_STEP = "finished step"
    """step after which rank 0 has done its work for watchers"""
    SAVED_STEP = "saved step"
    """step of the last state that rank 0 has written"""
    SUMMED_STEP = "summed step"
    """step whose sum of gradients a rank has reached"""
    LOST_PEER = "lost peer"
    """ranks that have found another one missing"""


_PROCESS_WIDE = frozenset({Topic.FAULT, Topic.AFTER_FIRST})


class RunStore:
    """Messages of a run's ranks: plain JSON, by topic and name. A run reads nothing of the runs before it.

    All methods but `begin_run` and `key` raise RuntimeError once the store has ended with its process.
    """

    def __init__(self, store: "Store | None") -> None:
        """store: torch's key-value store, which all ranks reach; None for a single process."""
        self._store, self._run = store, 0

    def begin_run(self) -> None:
        """Begin a run, with keys of its own."""
        self._run += 1

    def key(self, topic: Topic, name: str = "") -> str:
        """Return the store's key of a message."""
        scope = "process" if topic in _PROCESS_WIDE else f"run{self._run}"
        return f"{scope}/{topic.value}/{name}"

    @property
    def torch_store(self) -> "Store":
        """torch's key-value store."""
        assert self._store is not None, "a single process has no store"
        return self._store

    def set(self, topic: Topic, value: object, name: str = "") -> None:
        """Write a message that later ones of this topic and name replace."""
        self.torch_store.set(self.key(topic, name), json.dumps(value))

    def set_once(self, topic: Topic, value: object, name: str) -> None:
        """Write the only message of this topic and name: ranks that wait for it could read either of two."""
        key, text = self.key(topic, name), json.dumps(value)
        stored = self.torch_store.compare_set(key, "", text).decode()
        assert stored == text, f"{key} is used for {stored[:80]} and for {text[:80]}"

    def get(self, topic: Topic, name: str = "") -> Any:
        """Return a message; None if no rank has written it."""
        key = self.key(topic, name)
        return json.loads(self.torch_store.get(key)) if self.torch_store.check([key]) else None

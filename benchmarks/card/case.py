"""A case, and the cases of one process."""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Case:
    """One thing to check or time.

    settings: what to do, sent to the process.
    limit: timeout in seconds.
    least: the least seconds it takes; it is skipped if fewer are left.
    missing: the reason why it is skipped, one sentence.
    """

    name: str
    settings: dict[str, Any]
    limit: float = 120.0
    least: float = 5.0
    missing: str = ""

    def with_name(self, name: str) -> "Case":
        return replace(self, name=name)


@dataclass(frozen=True)
class Group:
    """Cases of one process.

    spec: arguments of the process. Groups with the same spec and environment share a process.
    share: the fraction of the part's time that it may take.
    timed: its seconds are results, so nothing else may run at the same time.
    """

    spec: dict[str, Any]
    cases: tuple[Case, ...]
    environment: dict[str, str] = field(default_factory=dict)
    share: float = 1.0
    timed: bool = False

    def process(self) -> tuple[Any, ...]:
        """Return the key that groups of one process share."""
        return tuple(sorted(self.spec.items())), tuple(sorted(self.environment.items()))

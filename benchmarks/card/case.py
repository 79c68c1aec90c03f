"""A case, and the cases of one process."""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Case:
    """One thing to check or time.

    how: what the process is told.
    limit: seconds after which it is taken to hang.
    least: seconds that it takes at least, for want of which it is left out.
    missing: a sentence on what it is left out for.
    """

    name: str
    how: dict[str, Any]
    limit: float = 120.0
    least: float = 5.0
    missing: str = ""

    def named(self, name: str) -> "Case":
        return replace(self, name=name)


@dataclass(frozen=True)
class Group:
    """Cases of one process.

    spec: what the process is started with. Groups of the same spec and environment share it.
    share: of a part's time, which it may take.
    timed: its seconds count, so that nothing else may run beside it.
    """

    spec: dict[str, Any]
    cases: tuple[Case, ...]
    environment: dict[str, str] = field(default_factory=dict)
    share: float = 1.0
    timed: bool = False

    def process(self) -> tuple[Any, ...]:
        """What groups of one process have in common."""
        return tuple(sorted(self.spec.items())), tuple(sorted(self.environment.items()))

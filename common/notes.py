"""Sentences for the user, which are shown on a node and logged."""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class Notes(list[str]):
    """Sentences for the user, each once, in the order in which they were added.

    observer: called with each new sentence.
    """

    observer: Callable[[str], None] | None = None

    def add(self, sentence: str) -> None:
        """Append and log a sentence, unless it is there already."""
        if sentence in self:
            return
        self.append(sentence)
        log.info(sentence)
        if self.observer is not None:
            self.observer(sentence)

    def watch(self, observer: Callable[[str], None]) -> None:
        """Call this observer with each new sentence from here on, in place of an earlier one."""
        self.observer = observer

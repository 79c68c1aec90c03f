"""Callbacks through which long work reports its progress and can be interrupted."""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Receives (done, total, text); the text says what is being done and how long it will take."""
Interrupted = Callable[[], None]
"""Is called between two pieces of work, and raises to stop it."""

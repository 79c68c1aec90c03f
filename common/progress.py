"""Callbacks with which long operations report progress and can be interrupted."""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Receives (completed, total, text); the text names the current work and the time it will take."""
Interrupted = Callable[[], None]
"""Called between two pieces of work; raises to stop."""

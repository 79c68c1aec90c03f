"""Limit on the pixels decoded at once for pages that show pictures."""

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .budgets import PIXELS_IN_FLIGHT


class PixelGate:
    """Gate for decoders in several threads: a picture waits until it fits within the limit with those in flight.

    A picture that exceeds the limit by itself is decoded alone.
    """

    def __init__(self, limit: int):
        """limit: pixels of all pictures decoded at once."""
        self.limit, self.in_flight = limit, 0
        self._changed = threading.Condition()

    @contextmanager
    def decoding(self, pixels: int) -> Iterator[None]:
        """Wait for room for a picture of this many pixels, and reserve it until it is decoded."""
        with self._changed:
            self._changed.wait_for(lambda: self.in_flight == 0 or self.in_flight + pixels <= self.limit)
            self.in_flight += pixels
        try:
            yield
        finally:
            with self._changed:
                self.in_flight -= pixels
                self._changed.notify_all()


page_pixels = PixelGate(PIXELS_IN_FLIGHT.pixels)


def return_freed_memory() -> None:
    """Return memory freed after decoding to the system: glibc keeps it, for each decoding thread."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)

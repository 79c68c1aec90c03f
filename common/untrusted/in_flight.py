"""Pixels in flight: how much is decoded at once for pages that look at pictures."""

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .budgets import PIXELS_IN_FLIGHT


class PixelGate:
    """Gate for decoders of several threads: a picture waits until it and those before it are within the bound.

    One picture that is above the bound alone goes through by itself.
    """

    def __init__(self, most: int):
        """most: pixels of all pictures that are decoded at once."""
        self.most, self.in_flight = most, 0
        self._changed = threading.Condition()

    @contextmanager
    def decoding(self, pixels: int) -> Iterator[None]:
        """Wait for room for a picture of so many pixels, and hold it until it is decoded."""
        with self._changed:
            self._changed.wait_for(lambda: self.in_flight == 0 or self.in_flight + pixels <= self.most)
            self.in_flight += pixels
        try:
            yield
        finally:
            with self._changed:
                self.in_flight -= pixels
                self._changed.notify_all()


page_pixels = PixelGate(PIXELS_IN_FLIGHT.pixels)


def return_freed_memory() -> None:
    """Return what was decoded and freed to the system: glibc keeps it, for each thread that decoded."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)

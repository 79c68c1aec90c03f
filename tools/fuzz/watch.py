"""The bounds of one input: seconds of CPU, bytes of memory, and errors that are no sentences for users."""

import faulthandler
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

CPU = 1.0  # seconds for one input …
CPU_PER_MB = 0.05  # … and for each MB of it
MEMORY = 512_000_000  # bytes above those of the process before
HANG = 60.0  # seconds, after which the process ends with its stack
# Errors of a kind that users get sentences in, but which Python itself raises.
RAW = (UnicodeError, json.JSONDecodeError)


class Broken(Exception):
    """A bound that an input broke; the message says which."""


def watched(read: Callable[[Any], Any], value: Any, size: int) -> None:
    """Give an input of `size` bytes to a reader. Raises Broken if a bound breaks."""
    faulthandler.dump_traceback_later(HANG, exit=True)
    try:
        start_seconds, peak = time.process_time(), peak_bytes(forget=True)
        try:
            read(value)
        except Broken:
            raise
        except Exception as error:
            if not isinstance(error, ValueError | OSError) or isinstance(error, RAW):
                raise Broken(f"{type(error).__name__}: {error}"[:400]) from error
            check_sentence(str(error))
        seconds, growth = time.process_time() - start_seconds, peak_bytes() - peak
        if seconds > (limit := CPU + CPU_PER_MB * size / 1e6):
            raise Broken(f"{seconds:.1f} s of CPU, more than {limit:.1f}")
        if growth > MEMORY:
            raise Broken(f"{growth / 1e6:,.0f} MB of memory, more than {MEMORY / 1e6:,.0f}")
    finally:
        faulthandler.cancel_dump_traceback_later()


def check_sentence(message: str) -> None:
    """Raise Broken for an error that says nothing, or repeats a whole input."""
    if not message.strip():
        raise Broken("an error without a message")
    if len(message) > 4000:
        raise Broken(f"an error of {len(message):,} characters")


def forgets() -> bool:
    """Reset the process's peak of memory. Return False if that fails: on other systems than Linux, and in a container
    that forbids it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5)
    except OSError:
        return False
    return True


def peak_bytes(forget: bool = False) -> int:
    """Return the peak memory of this process; its current memory if the system does not count peaks.

    forget: reset the peak first. Only Linux can, elsewhere an earlier peak hides lower ones.
    """
    if sys.platform == "win32":
        return psutil.Process().memory_info().rss
    if forget:
        forgets()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

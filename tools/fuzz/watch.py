"""The bounds of one input: seconds of CPU, bytes of memory, and errors that are no sentences for users."""

import faulthandler
import json
import linecache
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
CPU = 1.0  # seconds for one input …
CPU_PER_MB = 0.05  # … and for each MB of it
MEMORY = 512_000_000  # bytes above those of the process before
HANG = 60.0  # seconds of CPU for one input, after which the process ends with its stack …
BLOCKED = 900.0  # … as it does after this long on a busy machine, or if it waits for something
# Errors of a kind that users get sentences in, but which Python itself raises.
RAW = (UnicodeError, json.JSONDecodeError)


class Broken(Exception):
    """A bound that an input broke; the message says which."""


def watched(read: Callable[[Any], Any], value: Any, size: int) -> None:
    """Give an input of `size` bytes to a reader. Raises Broken if a bound breaks."""
    faulthandler.dump_traceback_later(BLOCKED, exit=True)
    _end_after(HANG)
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
            check_origin(error)
        seconds, growth = time.process_time() - start_seconds, peak_bytes() - peak
        if seconds > (limit := CPU + CPU_PER_MB * size / 1e6):
            raise Broken(f"{seconds:.1f} s of CPU, more than {limit:.1f}")
        if growth > MEMORY:
            raise Broken(f"{growth / 1e6:,.0f} MB of memory, more than {MEMORY / 1e6:,.0f}")
    finally:
        _end_after(0)
        faulthandler.cancel_dump_traceback_later()


def show_hangs() -> None:
    """Print the stack when this process is ended after HANG."""
    faulthandler.enable()
    if hasattr(signal, "SIGPROF"):  # not on Windows
        faulthandler.register(signal.SIGPROF, chain=True)


def _end_after(seconds: float) -> None:
    """End this process after so many seconds of CPU, by the signal that does so if nobody handles it; 0 for never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def check_sentence(message: str) -> None:
    """Raise Broken for an error that says nothing, or repeats a whole input."""
    if not message.strip():
        raise Broken("an error without a message")
    if len(message) > 4000:
        raise Broken(f"an error of {len(message):,} characters")


def check_origin(error: Exception) -> None:
    """Raise Broken for a ValueError that isn't ours: of Python, such as that of `int`, or of a library."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, ValueError):
        return
    file = trace.tb_frame.f_code.co_filename
    line = linecache.getline(file, trace.tb_lineno)
    if not Path(file).resolve().is_relative_to(ROOT) or not line.lstrip().startswith("raise"):
        raise Broken(f"{type(error).__name__}: {error}"[:400] + f" from {file}, line {trace.tb_lineno}") from error


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

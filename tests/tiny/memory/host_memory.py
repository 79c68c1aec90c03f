"""Anonymous memory of this process, as Linux counts it. Pinned memory is anonymous to the kernel, unless a driver maps
it; on a machine without a GPU all of it is counted."""

import ctypes
import gc
import threading
import time
from pathlib import Path
from typing import Any


def anonymous() -> int:
    """Bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak:
    """`highest`: the most bytes of anonymous memory that there were inside `with`."""

    def __enter__(self) -> "Peak":
        self.highest, self.stop = anonymous(), False
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.stop:
            self.highest = max(self.highest, anonymous())
            time.sleep(0.0005)

    def __exit__(self, *_: Any) -> None:
        self.stop = True
        self.thread.join()
        self.highest = max(self.highest, anonymous())


def settle() -> None:
    """Return freed memory to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)

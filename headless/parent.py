"""Processes that end with the one that started them."""

import ctypes
import os
import select
import signal
import sys
import threading
import time

from .rank import Rank

PARENT = "TESSERA_PARENT"  # id of the process without which this one is not to run


def watch_parent(rank: Rank, launches: bool) -> None:
    """End with the process that started this one, however that ends: who launches asks the devices to save and end.

    A device that torchrun has started ends at once, since the others are gone as well.
    """
    given = os.environ.get(PARENT)
    parent = int(given) if given else os.getppid()
    if sys.platform == "win32" or not (given or (rank.size > 1 and not launches)):
        return
    number = signal.SIGTERM if launches else signal.SIGKILL
    if given and not launches and sys.platform == "linux":
        # Also while this process hangs in a call that lets no other thread run. 1 is PR_SET_PDEATHSIG; the launcher
        # starts its devices in its main thread, whose end it is.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            if given and launches:
                # The server's end of this pipe is closed as well where the server starts anew in its own process.
                if select.select([sys.stdin], [], [], 0.5)[0] and not os.read(sys.stdin.fileno(), 1):
                    break
            else:
                time.sleep(0.5)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, name="tessera-parent", daemon=True).start()

"""Watch of the parent process: end when it ends."""

import ctypes
import os
import select
import signal
import sys
import threading
import time

from .rank import Rank

PARENT = "TESSERA_PARENT"  # environment variable with the id of the process that this one must not outlive


def watch_parent(rank: Rank, launches: bool) -> None:
    """End with the process that started this one, however it ends: a launcher asks its devices to save and end.

    A device that torchrun has started ends at once, since the others are gone as well.
    """
    parent_id = os.environ.get(PARENT)
    parent = int(parent_id) if parent_id else os.getppid()
    if sys.platform == "win32" or not (parent_id or (rank.size > 1 and not launches)):
        return
    number = signal.SIGTERM if launches else signal.SIGKILL
    if parent_id and not launches and sys.platform == "linux":
        # Works even while this process hangs in a call that holds the GIL. 1 is PR_SET_PDEATHSIG: the signal comes at
        # the end of the parent thread, and the launcher starts its devices in its main thread.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            if parent_id and launches:
                # The server's end of this pipe also closes if the server restarts within its process.
                if select.select([sys.stdin], [], [], 0.5)[0] and not os.read(sys.stdin.fileno(), 1):
                    break
            else:
                time.sleep(0.5)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, name="tessera-parent", daemon=True).start()

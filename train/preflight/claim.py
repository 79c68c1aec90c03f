"""Claim of a run's folder: no other process trains into it meanwhile, here or on a machine that shares the disk."""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from ...common.files import MACHINE, sweep_temporary
from ..checkpoint.run_folder import RunFolder
from ..checkpoint.run_record import PROGRESS, RunReader
from ..observer import Observer

BEAT = 5.0  # seconds between two signs of life
WATCHED = 30.0  # seconds in which a run of another machine would give one, whatever its interpreter is busy with
DEAD = 600.0  # seconds after the last one; the clocks of two machines differ by less


@contextmanager
def claimed_by_one(folder: RunFolder, observer: Observer) -> Iterator[None]:
    """Keep other processes from training into the folder meanwhile, however this one ends.

    Raises ValueError where one does.
    """
    sweep_temporary()
    with folder.claimed():  # holds where the other one has the same folder for temporary files
        check_elsewhere(folder, observer)
        ended = threading.Event()
        threading.Thread(target=_beat, args=(folder.path, ended), name="tessera-claim", daemon=True).start()
        try:
            yield
        finally:
            ended.set()


def check_elsewhere(folder: RunFolder, observer: Observer) -> None:
    """Raise ValueError where another machine trains into the folder, or a process here that `claimed` does not meet.

    A lock in the folder would be no help: many network disks have none that other machines see, and some keep that of a
    machine which lost its power. So the record of a run that has not told of its end is watched for signs of life, not
    compared with a clock, as two machines' clocks differ. One that was killed is waited for no longer than WATCHED.
    """
    with suppress(OSError):  # what can't be read is found by those who need it
        reader = RunReader(folder.path)
        facts = reader.facts()
        if not may_be_training(facts) or reader.read().status:  # it has ended
            return
        who = f"another ComfyUI on {facts['host']}" if facts.get("host") else "another machine"
        before = _signs(folder.path)
        if time.time() - before[0] / 1e9 > DEAD:
            return
        observer.phase(f"Making sure that {who} does not train into {folder.path.name} any more: {WATCHED:.0f} s")
        end = time.monotonic() + WATCHED
        while time.monotonic() < end:
            observer.check_interrupted()
            time.sleep(0.25)
            if _signs(folder.path) != before:
                raise ValueError(
                    f"output_name: {who} is training into {folder.path.name} right now; wait for it, or choose "
                    "another output_name."
                )


def may_be_training(facts: Mapping[str, Any]) -> bool:
    """Return False where the process that wrote this run.json is gone, or this one, as far as can be known from here.

    facts: contents of run.json; those of older versions name no process, and the oldest no machine.
    """
    machine, process = facts.get("machine", MACHINE), facts.get("process")
    if machine != MACHINE:
        return True
    try:
        return process not in (None, os.getpid()) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, TypeError, ValueError, OverflowError):
        return False


def _beat(folder: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with suppress(OSError):  # not there yet, or the disk is away
            os.utime(folder / PROGRESS)


def _signs(folder: Path) -> tuple[int, int]:
    """Return time in nanoseconds and size of the record, as they are on the disk now."""
    with open(folder / PROGRESS, "rb") as file:  # NFS asks its server when a file is opened, and may not otherwise
        found = os.fstat(file.fileno())
    return found.st_mtime_ns, found.st_size

"""Claim of a run's folder: keep other processes here, or on machines that share the disk, from training into it."""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import psutil
from filelock import Timeout

from ...common.files import MACHINE, lock_of, sweep_temporary
from ...common.untrusted.regular_files import open_regular
from ..report.observer import Observer
from ..runs.run_folder import RunFolder
from ..runs.run_record import PROGRESS, RunReader

BEAT = 5.0  # seconds between two signs of life
WATCHED = 30.0  # seconds in which a run on another machine gives one, however busy its interpreter is
DEAD = 600.0  # seconds after the last sign; the clocks of two machines differ by less


@contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Keep other processes of this machine from training into a run's folder, however this one ends.

    Raises ValueError if one already does.
    """
    name = blake2b(os.fsencode(path.resolve()), digest_size=8).hexdigest()
    lock = lock_of(name)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"output_name: another ComfyUI on this machine is training into {path.name} right now; wait for it, or "
            "choose another output_name."
        ) from None
    except OSError:  # the lock is unavailable, such as another user's: train without it
        yield
        return
    try:
        yield
    finally:
        lock.release()


@contextmanager
def claimed_by_one(folder: RunFolder, observer: Observer) -> Iterator[None]:
    """Keep other processes from training into the folder inside the context, however this process ends.

    Raises ValueError if one already does.
    """
    sweep_temporary()
    with lock_folder(folder.path):  # holds if the other process has the same folder for temporary files
        check_elsewhere(folder, observer)
        ended = threading.Event()
        threading.Thread(target=_beat, args=(folder.path, ended), name="tessera-claim", daemon=True).start()
        try:
            yield
        finally:
            ended.set()


def check_elsewhere(folder: RunFolder, observer: Observer) -> None:
    """Raise ValueError if another machine trains into the folder, or a process here that `lock_folder` does not detect.

    A lock in the folder would not help: many network disks have none that other machines see, and some keep the lock of
    a machine that lost power. So the record of a run without a recorded end is watched for signs of life, not compared
    with the clock, as two machines' clocks differ. A killed run delays the start by no more than WATCHED.
    """
    with suppress(OSError):  # files that can't be read are reported by the code that needs them
        reader = RunReader(folder.path)
        facts = reader.facts()
        if not may_be_training(facts) or reader.read().status:  # it has ended
            return
        other_process = f"another ComfyUI on {facts['host']}" if facts.get("host") else "another machine"
        first_signs = _signs(folder.path)
        if time.time() - first_signs[0] / 1e9 > DEAD:
            return
        observer.phase(
            f"Making sure that {other_process} does not train into {folder.path.name} any more: {WATCHED:.0f} s"
        )
        end = time.monotonic() + WATCHED
        while time.monotonic() < end:
            observer.check_interrupted()
            time.sleep(0.25)
            if _signs(folder.path) != first_signs:
                raise ValueError(
                    f"output_name: {other_process} is training into {folder.path.name} right now; wait for it, or "
                    "choose another output_name."
                )


def may_be_training(facts: Mapping[str, Any]) -> bool:
    """Return False if the process that wrote this run.json is this one, or gone as far as this machine can know.

    facts: contents of run.json, empty without one.
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
        with suppress(OSError):  # not written yet, or the disk is unavailable
            os.utime(folder / PROGRESS)


def _signs(folder: Path) -> tuple[int, int]:
    """Return the current mtime in nanoseconds and size of the record on disk."""
    with open_regular(folder / PROGRESS) as file:  # NFS queries its server when a file is opened, otherwise maybe not
        status = os.fstat(file.fileno())
    return status.st_mtime_ns, status.st_size

"""Two jobs that go on with one run: the second is refused, on another machine too, and a killed one is in no way."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tessera.common.files import MACHINE
from tessera.train.preflight import claim
from tessera.train.preflight.claim import claimed_by_one, lock_folder
from tessera.train.runs.run_folder import RunFolder
from tessera.train.runs.run_record import PROGRESS, RUN, RunRecord

ELSEWHERE = {"machine": "0" * 8, "host": "node-7", "process": 12}


class Watching:
    """Observer of a run."""

    def __init__(self):
        self.phases = []
        self.phase = self.phases.append

    def check_interrupted(self):
        pass


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "BEAT", 0.05)
    return RunFolder(tmp_path / "face (001)", "face")


def killed(folder, facts=ELSEWHERE, age=3.0):
    """Leave the record of a run that did not tell of its end."""
    folder.path.mkdir(exist_ok=True)
    RunRecord(folder.path, facts)
    mtime = time.time() - age
    os.utime(folder.path / PROGRESS, (mtime, mtime))


def claim_of(folder):
    """Claim a run and let go of it. Returns what was told of waiting for another one."""
    observer = Watching()
    with claimed_by_one(folder, observer):
        return observer.phases


def beats(path):
    ended = threading.Event()
    thread = threading.Thread(target=claim._beat, args=(path, ended))
    thread.start()
    return lambda: (ended.set(), thread.join())


def test_a_run_of_another_machine_is_not_joined_while_it_gives_signs_of_life(folder):
    killed(folder)
    stop = beats(folder.path)
    try:
        with pytest.raises(ValueError) as error:
            claim_of(folder)
    finally:
        stop()
    assert str(error.value) == (
        "output_name: another ComfyUI on node-7 is training into face (001) right now; wait for it, or choose another "
        "output_name."
    )
    assert (folder.path / PROGRESS).read_text().count("start") == 1


@pytest.mark.parametrize("skew", [-300.0, 0.0, 300.0])
def test_one_that_was_killed_there_is_waited_for_a_short_time_whatever_its_clock(skew, folder, monkeypatch):
    monkeypatch.setattr(claim, "WATCHED", 1.0)
    killed(folder, age=skew)
    start = time.monotonic()
    (said,) = claim_of(folder)
    assert time.monotonic() - start >= 1
    assert said == "Making sure that another ComfyUI on node-7 does not train into face (001) any more: 1 s"


def test_claim_of_a_run_known_to_have_ended_is_not_waited_for(folder):
    assert claim_of(folder) == []  # a new folder
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    facts = (
        {},
        {"machine": MACHINE},
        {"machine": MACHINE, "process": process.pid},
        {"machine": MACHINE, "process": "x"},
    )
    for record in (*facts, {"machine": MACHINE, "process": os.getpid()}):
        killed(folder, record)
        assert claim_of(folder) == [], record
    killed(folder, age=3600.0)
    assert claim_of(folder) == []
    RunRecord(folder.path, ELSEWHERE).end("cancelled", 3, "")
    assert claim_of(folder) == []
    (folder.path / RUN).write_text(json.dumps(ELSEWHERE))
    (folder.path / PROGRESS).unlink()
    assert claim_of(folder) == []


def test_a_job_here_with_another_folder_for_temporary_files_is_met(folder, tmp_path, monkeypatch):
    """As Slurm gives to each job."""
    trains = (
        "import sys, time, pathlib, os\n"
        "sys.path[0] = sys.argv[2]\n"
        "import with_comfyui\n"
        "from tessera.train.preflight import claim\n"
        "from tessera.train.runs.run_folder import RunFolder\n"
        "from tessera.train.runs.run_record import RunRecord\n"
        "from tessera.common.files import MACHINE\n"
        "folder, claim.BEAT = RunFolder(pathlib.Path(sys.argv[1]), 'face'), 0.05\n"
        "with claim.claimed_by_one(folder, None):\n"
        "    RunRecord(folder.path, {'machine': MACHINE, 'host': 'here', 'process': os.getpid()})\n"
        "    print('trains', flush=True)\n"
        "    time.sleep(20)\n"
    )
    folder.path.mkdir()
    (tmp_path / "tmp").mkdir()
    support = Path(__file__).resolve().parents[3] / "support"
    command = [sys.executable, "-c", trains, str(folder.path), str(support)]
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "trains\n"
        with pytest.raises(ValueError, match="another ComfyUI on here is training into"):
            claim_of(folder)
        process.kill()
        process.wait()
    assert claim_of(folder) == []


def test_the_wait_can_be_cancelled(folder):
    killed(folder)
    observer = Watching()

    def cancelled():
        raise KeyboardInterrupt

    observer.check_interrupted = cancelled
    with pytest.raises(KeyboardInterrupt):
        with claimed_by_one(folder, observer):
            pass
    with lock_folder(folder.path):  # it has let go of it
        pass


def test_a_run_gives_signs_of_life_while_it_computes_and_none_when_it_has_ended(folder):
    folder.path.mkdir()
    with claimed_by_one(folder, Watching()):
        RunRecord(folder.path, ELSEWHERE)
        signs, end = claim._signs(folder.path), time.monotonic() + 30
        while claim._signs(folder.path) == signs:
            assert time.monotonic() < end
            time.sleep(0.05)
    for thread in threading.enumerate():
        if thread.name == "tessera-claim":
            thread.join(30)
    signs = claim._signs(folder.path)
    time.sleep(0.3)
    assert claim._signs(folder.path) == signs

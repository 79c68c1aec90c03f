"""benchmarks/studies/meetings.py measures meetings as they are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
MEASURES = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from studies import meetings
meetings.MEETINGS, meetings.PERIOD = 5, 0.8
print(json.dumps(meetings.measured(3, 0.7)))
Barrier, enter = meetings.barrier.Barrier, meetings.barrier.Barrier._enter
def late(barrier, entry):
    time.sleep(0.15 if barrier.rank == 0 else 0.0)  # the last that comes, and it is slow to say so
    enter(barrier, entry)
Barrier._enter = late
print(json.dumps(meetings.measured(3, 0.7)))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_the_time_is_that_from_when_the_last_one_comes_to_when_the_last_one_leaves():
    command = [sys.executable, "-c", MEASURES, str(BENCHMARKS)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    first, slow = (json.loads(line) for line in process.stdout.splitlines())
    assert first["ranks"] == 3 and first["requests"] >= 3 * 4 and 0 < first["median"] < 0.15
    assert slow["median"] > 0.15

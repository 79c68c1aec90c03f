"""`dev.py fuzz`: what it calls a fault, and a minute of it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[3]
FUZZ = ROOT / "tools" / "fuzz"
sys.path.append(str(FUZZ))

import watch  # noqa: E402
from readers import READERS, Reader  # noqa: E402
from search import search  # noqa: E402


def raise_for(text: str) -> None:
    if "{" in text:
        raise KeyError(text)


def compute_for(text: str) -> None:
    end = time.process_time() + (0.2 if len(text) > 2 else 0.0)
    while time.process_time() < end:
        pass


def fill_memory(text: str) -> None:
    b"x" * (300_000_000 if len(text) > 2 else 0)


def say_nothing(text: str) -> None:
    if text:
        raise ValueError("")


@pytest.mark.parametrize(
    ("read", "bound", "length"),
    [
        (raise_for, "KeyError", 1),
        (compute_for, "s of CPU, more than 0.1", 3),
        (fill_memory, "MB of memory, more than 100", 3),
        (say_nothing, "an error without a message", 1),
    ],
)
def test_a_planted_fault_is_found_with_its_smallest_input(read, bound, length, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "CPU", 0.1 if read is compute_for else 10.0)
    monkeypatch.setattr(watch, "MEMORY", 100_000_000)
    inputs = st.text(st.sampled_from("0{ab"), max_size=40)
    if read is fill_memory:
        if not watch.forgets():
            pytest.skip("Here an earlier peak of this process hides what one input takes.")
        bytearray(600_000_000)  # an earlier peak, as other tests of this process leave one
    count, fault = search(Reader("planted", inputs, read), "0", 200, tmp_path)
    assert fault is not None and bound in fault.bound and count <= 2000
    assert length is None or len(fault.value) == length
    assert fault.reader in str(fault) and repr(fault.value) in str(fault)


def test_an_input_that_is_refused_in_a_sentence_is_no_fault(tmp_path):
    def refuse(text: str) -> None:
        raise ValueError(f"The text has {len(text)} letters; write more.")

    count, fault = search(Reader("refused", st.text(), refuse), "0", 50, tmp_path)
    assert fault is None and count == 50


def test_the_same_seed_gives_the_same_inputs(tmp_path):
    def inputs_of(seed: str) -> list[str]:
        inputs: list[str] = []
        search(Reader("same", READERS[0].inputs, inputs.append), seed, 20, tmp_path)
        return inputs

    assert inputs_of("1") == inputs_of("1") != inputs_of("2")


def test_hostile_inputs_break_no_bound():
    command = [sys.executable, str(FUZZ), "--seconds", "60", "--seed", "0"]
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.returncode == 0, f"{process.stdout[-6000:]}\n{process.stderr[-3000:]}"
    assert "0 faults" in process.stdout and "inputs to a server" in process.stdout

"""A step's seconds are parted among data, waiting and the host, and counted by the device beside that."""

from typing import Any

import pytest
import torch
from tessera.train.step import clock as module
from tessera.train.step.clock import KEPT, StepClock


class Time:
    """A clock that is set by hand."""

    seconds = 100.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture
def time(monkeypatch) -> Time:
    set_by_hand = Time()
    monkeypatch.setattr(module, "time", set_by_hand)
    return set_by_hand


def one_step(clock: StepClock, time: Time, host: float, data: float, wait: float) -> None:
    clock.begin()
    time.seconds += host / 2
    for part, seconds in (("data", data / 2), ("wait", wait), ("data", data / 2)):
        with clock.spend(part):
            time.seconds += seconds
    time.seconds += host / 2
    clock.end()


def test_the_parts_are_medians_and_add_up_to_a_step(time):
    clock = StepClock(torch.device("cpu"))
    assert clock.pace() is None and set(clock.facts().values()) == {None}
    clock.begin()
    with clock.spend("data"):
        time.seconds += 50  # a step that compiled is begun and not ended
    for _ in range(3):
        one_step(clock, time, 0.5, 0.25, 2.0)
    assert clock.pace() == 2.75
    assert clock.facts() == {
        "seconds_per_step": 2.75,
        "host_seconds": 0.5,
        "wait_seconds": 2.0,
        "data_seconds": 0.25,
        "device_seconds": None,
    }
    for _ in range(KEPT):
        one_step(clock, time, 1.0, 0.0, 0.0)
    assert clock.pace() == 1.0 and len(clock.steps) == KEPT
    clock.clear()
    assert clock.pace() is None


def test_errors_are_counted_to_their_part(time):
    clock = StepClock(torch.device("cpu"))
    clock.begin()
    with pytest.raises(ValueError, match="gone"), clock.spend("data"):
        time.seconds += 1.0
        raise ValueError("gone")
    clock.end()
    assert clock.facts()["data_seconds"] == 1.0


def test_on_a_gpu_events_stand_around_each_step_and_are_read_at_the_end(time, monkeypatch):
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")
            self.moment = time.seconds

        def synchronize(self) -> None:
            calls.append("synchronize")

        def elapsed_time(self, other: Any) -> float:
            return 1000 * (other.moment - self.moment)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StepClock(torch.device("cuda"))
    for _ in range(2):
        one_step(clock, time, 0.5, 0.25, 2.0)
    assert calls == ["record"] * 4  # no step waits for them
    assert clock.facts()["device_seconds"] == 2.75 and calls[4:] == ["synchronize"] * 2

"""The record of a run: what a reader finds, whatever the disk, a killed process or a stranger left in it."""

import json
import os
import time

import pytest
from tessera.train.runs import run_record
from tessera.train.runs.run_record import MOST_POINTS, PROGRESS, RunReader, RunRecord, thinned


@pytest.fixture
def at_once(monkeypatch):
    """Every line is written at once."""
    monkeypatch.setattr(run_record, "SECONDS_BETWEEN_WRITES", 0.0)


def trained(record, steps, rate=1e-4):
    for step in steps:
        record.add("step", step=step, loss=1 / step, rate=rate)


def test_a_reader_finds_what_was_told_and_then_only_what_came_since(tmp_path, at_once):
    record = RunRecord(tmp_path, {"key": "k", "steps": 9})
    record.begin(0, [], [])
    trained(record, range(1, 4))
    record.add("validation", step=3, loss=0.5)
    reader = RunReader(tmp_path)
    assert reader.facts() == {"key": "k", "steps": 9}
    assert list(reader.read().loss.values()) == [(1, 1.0, 1e-4), (2, 0.5, 1e-4), (3, pytest.approx(1 / 3), 1e-4)]
    record.add("saved", step=3, file="a-step000003.safetensors")
    trained(record, [4])
    record.add("end", status="cancelled", step=4, text="Stopped at step 4 and saved; Run goes on from there.")
    curve = reader.read()
    assert (curve.step, curve.status) == (4, "cancelled") and curve.text.startswith("Stopped at step 4")
    assert list(curve.saves.values()) == [(3, "a-step000003.safetensors")]
    assert list(curve.validation.values()) == [(3, 0.5)]


def test_beginning_of_a_run_is_written_as_soon_as_possible(tmp_path, at_once):
    (tmp_path / "run.json").mkdir()
    record = RunRecord(tmp_path, {"key": "k"})
    trained(record, [1])
    reader = RunReader(tmp_path)
    assert reader.facts() == {} and reader.read().step == 1
    (tmp_path / "run.json").rmdir()
    trained(record, [2])
    assert reader.facts() == {"key": "k"} and reader.read().step == 2


def test_lines_are_written_at_most_once_a_second(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(run_record.time, "monotonic", lambda: clock[0])
    record = RunRecord(tmp_path, {})
    sizes = set()
    for step in range(1, 101):  # ten steps a second
        clock[0] += 0.1
        trained(record, [step])
        sizes.add((tmp_path / PROGRESS).stat().st_size)
    assert 9 <= len(sizes) <= 11
    record.write()
    assert RunReader(tmp_path).read().step == 100


def test_the_last_lines_before_a_long_wait_are_written_too(tmp_path):
    record = RunRecord(tmp_path, {})
    trained(record, range(1, 4))
    end = time.monotonic() + 30
    while RunReader(tmp_path).read().step < 3:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_steps_of_a_killed_session_past_its_state_give_way_to_the_one_that_goes_on(tmp_path, at_once):
    first = RunRecord(tmp_path, {})
    first.begin(0, [], [])
    trained(first, range(1, 8))
    for step in (5, 7):
        first.add("saved", step=step, file="x")
        first.add("preview", step=step)
    first.add("end", status="failed", step=7, text="no")
    with open(tmp_path / PROGRESS, "a", encoding="utf-8") as file:
        file.write('{"kind":"step","step":8,"lo')  # a line that was cut off
    second = RunRecord(tmp_path, {})
    assert RunReader(tmp_path).read().status == ""  # it is loading: the error was the other session's
    second.begin(5, [0.5] * 5, [{"step": 4, "loss": 0.25, "losses": []}])
    trained(second, [6], rate=1.0)
    curve = RunReader(tmp_path).read()
    assert [point[:2] for point in curve.loss.values()] == [*((number, 0.5) for number in range(1, 6)), (6, 1 / 6)]
    assert [rate for _, _, rate in curve.loss.values()] == [1e-4] * 5 + [1.0]
    assert list(curve.saves) == list(curve.previews) == [5] and list(curve.validation) == [4]


def test_the_time_of_a_run_is_that_of_its_sessions_as_far_as_it_is_known(tmp_path, monkeypatch, at_once):
    clock = [100.0]
    monkeypatch.setattr(run_record.time, "monotonic", lambda: clock[0])

    def session(begin, seconds, ends=True):
        record = RunRecord(tmp_path, {})
        record.begin(begin, [0.5] * begin, [])
        clock[0] += seconds
        if ends:
            record.end("cancelled", begin + 1, "")
        curve = RunReader(tmp_path).read()
        return curve.seconds, curve.timed_from

    assert session(0, 60) == (60, 0)
    assert session(1, 5) == (65, 0)
    session(2, 7, ends=False)  # killed
    assert session(2, 10) == (10, 2)
    assert session(3, 1) == (11, 2)
    assert session(0, 8) == (8, 0)  # it begins anew
    with open(tmp_path / PROGRESS, "a", encoding="utf-8") as file:
        file.write('{"kind":"start"}\n{"kind":"end","status":"failed","text":"","seconds":NaN}\n')
    assert RunReader(tmp_path).read().seconds is None


def test_a_disk_that_refuses_ends_nothing_and_gets_the_lines_later(tmp_path, at_once):
    (tmp_path / "run").write_text("")  # where the folder would be
    record = RunRecord(tmp_path / "run", {"key": "k"})
    record.begin(0, [], [])
    trained(record, [1, 2])
    (tmp_path / "run").unlink()
    (tmp_path / "run").mkdir()
    trained(record, [3])
    assert list(RunReader(tmp_path / "run").read().loss) == [1, 2, 3]


@pytest.mark.parametrize(
    "line",
    [
        "[]", "7", "{}", "nonsense", '{"kind":"step","step":1e99,"loss":1,"rate":1}', '{"kind":"end"}',
        '{"kind":"step","step":-1,"loss":1,"rate":1}', '{"kind":"step","step":1,"loss":NaN,"rate":1}',
        '{"kind":"begin","step":0,"loss":"12","validation":[]}', "[" * 100000, "\x00\xff",
        '{"kind":"begin","step":0,"loss":[1],"validation":[1]}', '{"kind":"saved","step":true,"file":"a"}',
        '{"kind":"validation","step":1,"loss":[1]}',
    ],
)  # fmt: skip
def test_a_damaged_line_changes_nothing(tmp_path, line):
    good = '\n{"kind":"step","step":1,"loss":0.5,"rate":0.1}\n'
    (tmp_path / PROGRESS).write_text(good + line + "\n", encoding="utf-8")
    curve = RunReader(tmp_path).read()
    assert curve == run_record.RunCurve(loss={1: (1, 0.5, 0.1)})


@pytest.mark.skipif(os.name == "nt", reason="links need rights")
@pytest.mark.parametrize("name", [PROGRESS, "run.json"])
def test_a_link_out_of_the_folder_and_a_pipe_are_not_read(tmp_path, name):
    (run := tmp_path / "run").mkdir()
    secret = {"kind": "step", "step": 1, "loss": 0.5, "rate": 0.1, "key": "secret", "status": "x"}
    (tmp_path / "other").write_text(json.dumps(secret) + "\n")
    (run / name).symlink_to(tmp_path / "other")
    reader = RunReader(run)
    assert reader.facts() == {} and reader.read() == run_record.RunCurve()
    (run / name).unlink()
    assert run_record.own_file(run, "../other") is None and run_record.own_file(tmp_path, "other") is not None
    os.mkfifo(run / name)  # to open it would wait for ever
    assert reader.facts() == {} and reader.read() == run_record.RunCurve()


def test_a_record_that_takes_the_place_of_another_is_read_from_its_beginning(tmp_path, at_once):
    """A run is deleted and another comes back from the trash, or a copy is put there that is shorter."""
    path, aside = tmp_path / PROGRESS, tmp_path / "aside"
    trained(RunRecord(tmp_path, {}), range(1, 4))
    reader = RunReader(tmp_path)
    assert reader.read().step == 3
    path.rename(aside)  # so that its file number is not given to the next one
    trained(RunRecord(tmp_path, {}), range(1, 9), rate=2e-4)
    assert [point[2] for point in reader.read().loss.values()] == [2e-4] * 8
    with open(path, "r+b") as file:
        file.write(aside.read_bytes())
        file.truncate()
    assert [point[2] for point in reader.read().loss.values()] == [1e-4] * 3


def test_a_line_that_is_just_being_written_is_read_once_it_is_whole(tmp_path, at_once):
    trained(RunRecord(tmp_path, {}), [1])
    reader, line = RunReader(tmp_path), '{"kind":"step","step":2,"loss":0.5,"rate":0.0001}\n'
    for part, step in ((line[:20], 1), (line[20:], 2)):
        with open(tmp_path / PROGRESS, "a", encoding="utf-8") as file:
            file.write(part)
        assert reader.read().step == step


def test_thinning_keeps_lows_peaks_and_the_last_point():
    points = [(step, 1.0) for step in range(1, 100_001)]
    points[777], points[77_700] = (778, 9.0), (77_701, -9.0)  # neither is first or last of a stretch
    thin = thinned(points)
    assert len(thin) <= MOST_POINTS and thin == sorted(thin)
    assert {points[777], points[77_700], points[-1]} <= set(thin)
    assert thinned(points[:MOST_POINTS]) == points[:MOST_POINTS]


def test_the_steps_that_were_asked_for_at_first_are_those_until_it_was_first_finished(tmp_path, at_once):
    def session(folder, begin, end, status):
        record = RunRecord(folder, {})
        record.begin(begin, [1.0] * begin, [])
        trained(record, range(begin + 1, end + 1))
        record.end(status, end, "")
        return RunReader(folder).read().first_steps

    (continued := tmp_path / "further").mkdir()
    assert session(tmp_path, 0, 40, "stopped") == 0
    assert session(tmp_path, 40, 60, "finished") == 60
    assert session(tmp_path, 60, 90, "finished") == 60
    assert session(continued, 60, 120, "finished") == 60  # it went on from another run
    assert session(continued, 0, 50, "finished") == 50  # begun anew

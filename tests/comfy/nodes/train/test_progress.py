"""Progress of a run as the server sends it to the page."""

import time

from tessera.nodes.common import progress
from tessera.train.report.observer import StepReport


def test_lines_of_progress_come_ten_times_a_second_at_most_and_the_last_step_has_one(monkeypatch):
    lines = []
    monkeypatch.setattr(progress, "show_progress_text", lambda node_id, text: lines.append(text))
    begin = time.monotonic()
    observer = progress.ServerObserver("1", 50)
    for step in range(1, 51):
        observer.step(StepReport(step, 50, 0.5, 1e-4, None, None))
        time.sleep(0.01)
    assert lines[0].startswith("step 1/50") and lines[-1].startswith("step 50/50")
    assert 2 < len(lines) <= 10 * (time.monotonic() - begin) + 2

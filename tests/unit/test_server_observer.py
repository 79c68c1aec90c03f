"""What the page that queued a run is told while it trains."""

from tessera.nodes.common import progress
from tessera.train.observer import StepReport


def test_of_short_steps_four_a_second_are_told(monkeypatch):
    """Each message holds up the thread that trains."""
    now, sent = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    observer = progress.ServerObserver("1", 64)
    monkeypatch.setattr(observer, "_send", lambda kind, **values: sent.append(values["step"]))
    for step in range(1, 65):
        observer.step(StepReport(step, 64, 0.5, 1e-4, None, None))
        now[0] += 0.0625
    assert sent == [*range(1, 65, 4), 64]

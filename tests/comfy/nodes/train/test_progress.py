"""Progress of a run as the server sends it to the page."""

from pathlib import Path

from tessera.nodes.common import progress
from tessera.train.report.observer import StepReport


def test_comfyui_s_line_of_progress_ends_where_the_panel_of_the_run_begins(monkeypatch):
    lines = []
    monkeypatch.setattr(progress, "show_progress_text", lambda node_id, text: lines.append(text))
    monkeypatch.setattr(progress, "place_in_output", lambda path: path)
    observer = progress.ServerObserver("1", 50)
    observer.phase("Loading the model")
    observer.began(Path("film (001)"))
    observer.phase("Training")
    observer.step(StepReport(1, 50, 0.5, 1e-4, None, None))
    observer.ended("finished", "")
    assert lines == ["Loading the model"]

"""Seeing that a run which was cut short and went on is the one that was not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from comfy.model_management import InterruptProcessingException

from .runs import Watcher, cancel_at, train


def resumed_as_whole(model: Any, data: Any, root: Path, **changes: Any) -> Any:
    """The result of a run, after seeing that one which is cancelled after step 3 and goes on has the same, bit for
    bit."""
    whole = train(model, data, root / "whole", **changes)
    with pytest.raises(InterruptProcessingException):
        train(model, data, root / "cancelled", cancel_at(3), **changes)
    watcher = Watcher()
    resumed = train(model, data, root / "cancelled", watcher, **changes)
    assert "Resumed at step 3." in watcher.notes
    assert resumed.loss == whole.loss and resumed.summary["key"] == whole.summary["key"]
    assert resumed.lora.keys() == whole.lora.keys()
    assert all(torch.equal(resumed.lora[name], whole.lora[name]) for name in whole.lora)
    return whole

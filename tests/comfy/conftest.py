"""These tests run in a process with torch and ComfyUI."""

import pytest
from with_comfyui import pytest_configure as pytest_configure


@pytest.fixture
def unchecked(monkeypatch):
    """Runs begin without the check of their forward, of which there would be more to count."""
    from tessera.train.placement.placed_model import PlacedModel

    monkeypatch.setattr(PlacedModel, "check_forward", lambda *_: None)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory, tiny_files):
    """Processes that train together; started by the first test that uses them."""
    from tiny.train.ranks import Ranks

    started = Ranks(tmp_path_factory.mktemp("ranks"), tiny_files["flux"])
    yield started
    started.close()

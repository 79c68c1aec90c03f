"""Load Diffusion Model gives MODELs that sample, whatever format the file has."""

from pathlib import Path

import folder_paths
import pytest
import tiny
import torch
from tessera.nodes.loaders import TesseraLoadDiffusionModel
from tiny.sampling import sample


@pytest.mark.parametrize("scaled", [False, True])
def test_a_model_that_the_node_loads_samples_as_one_of_cores_loader(scaled: bool, tmp_path: Path, monkeypatch) -> None:
    path = tiny.write_flux(tmp_path / "flux.safetensors", fp8=scaled)
    monkeypatch.setattr(folder_paths, "get_full_path_or_raise", lambda *_: str(path))
    with torch.inference_mode():
        ours = TesseraLoadDiffusionModel.execute(path.name, "default").args[0]
        cores = tiny.load_flux(path)
    assert torch.equal(sample(ours, "flux"), sample(cores, "flux"))

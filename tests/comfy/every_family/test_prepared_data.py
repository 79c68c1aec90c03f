"""What Prepare Dataset makes of folders with the encoders of a family is what the family trains on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_cases import cases
from PIL import Image
from tessera.data.folders.dataset import Dataset, scan_images, scan_videos
from tessera.data.media.clip_windows import Extraction
from thinned import one_in
from tiny.data.films import write_film
from tiny.data.preparing import prepare
from tiny.train.runs import train


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Folders of two `films`, of three pictures (`after`) and their control pictures (`before`)."""
    for name in ("films", "after", "before"):
        (tmp_path / name).mkdir()
    for name, size in (("a", (64, 96)), ("b", (96, 64))):
        write_film(tmp_path / "films" / f"{name}.mp4", 9, size=size, caption=f"film {name}")
    for index, (height, width) in enumerate(((64, 96), (96, 64), (80, 80))):
        for folder in ("after", "before"):
            pixels = np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / folder / f"{index}.png")
        (tmp_path / "after" / f"{index}.txt").write_text("a picture " * (index * 30 + 1))
    return tmp_path


def scanned(kind: str, folders: Path) -> Dataset:
    """One of the kinds that `FamilyCase.folders` names."""
    if kind == "controls":
        return scan_images(folders / "after", control_folder=folders / "before")
    if kind == "pictures":
        return scan_images(folders / "after")
    clips = scan_videos(folders / "films", Extraction((5, 9)))
    return clips if kind == "clips" else clips + scan_images(folders / "after")


RUNS = [
    pytest.param(case, kind, graphs, id=f"{case.name}-{kind}")
    for case in cases("prepared data")
    for kind, graphs in case.folders().items()
]


@pytest.mark.parametrize(("case", "kind", "graphs"), one_in(4, RUNS))
def test_every_family_trains_on_what_prepare_dataset_makes_of_folders(
    folders: Path, tiny_files: dict[str, Path], case_file: Any, case: Any, kind: str, graphs: int
) -> None:
    encoders = case.encoders(tiny_files)
    options = {"megapixels": 0.006, "max_graphs": 1, "fit": "ragged edge", "max_text_length": 512}
    options |= {"control_megapixels": 0.0046875, "cache_dir": folders / "cache", "clip_vision": encoders.clip_vision}
    with torch.inference_mode():
        data = prepare(scanned(kind, folders), encoders.vae, encoders.clip, **{**options, **encoders.options}).data
    assert len(data.graph_keys()) == graphs
    assert {len(sample.references) for sample in data.samples} == {int(kind == "controls")}
    padded = case.padded_caption
    assert padded is None or {sample.text_length for sample in data.samples} == {padded}
    steps = 2 * graphs
    model = case.load(case_file(case, **encoders.sizes))
    result = train(model, data, folders / "run", steps=steps, batch_size=2)
    assert len(result.loss) == steps and all(np.isfinite(result.loss))

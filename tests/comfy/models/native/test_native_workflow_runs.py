"""The shared workflows that train with ComfyUI's own forward, queued on tiny models: each leaves a LoRA, and a picture
or a clip sampled with it."""

import av
import numpy as np
import pytest
from comfy_server import ComfyServer
from PIL import Image
from safetensors import safe_open
from thinned import one_in
from tiny.data.films import write_film
from tiny.models.ltx import write_distilled
from tiny.native.workflow import CASES, fitted

STEPS = 2


@pytest.fixture(scope="module")
def filled(server: ComfyServer) -> ComfyServer:
    """The server with two pictures and two clips in the folders that the workflows name."""
    folder = server.base / "input" / "my_pictures"
    folder.mkdir(exist_ok=True)
    for number, size in enumerate([(64, 96), (96, 64)]):
        pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
    (clips := server.base / "input" / "my_clips").mkdir(exist_ok=True)
    # What a caption quotes goes through an encoder of its own in HunyuanVideo 1.5.
    for number, caption in enumerate(["a grey film", 'a film named "grey"']):
        write_film(clips / f"{number}.mp4", 17, fps=24, size=(96, 96 + 32 * number), caption=caption)
    write_distilled(server.base / "models" / "loras")
    return server


@pytest.mark.parametrize("name", one_in(3, CASES))
def test_a_workflow_trains_and_samples_with_its_lora(name, filled):
    prompt = fitted(name)
    entry = filled.run(prompt)
    (train,) = (key for key, node in prompt.items() if node["class_type"] == "TesseraTrainLora")
    (summary,) = entry["outputs"][train]["tessera"]
    assert (summary["status"], summary["steps_done"]) == ("finished", STEPS), summary
    assert summary["previews"]["files"] and not any("failed" in note for note in summary["notes"])
    with safe_open(filled.base / "output" / summary["path"], "pt") as file:
        assert len(file.keys()) == 3 * summary["targets"] > 0
    savers = {key for key, node in prompt.items() if node["class_type"] in ("SaveImage", "SaveVideo")}
    assert savers and savers <= entry["outputs"].keys()
    saved = [file for output in entry["outputs"].values() for file in output.get("images", ())]
    files = [filled.base / "output" / f["subfolder"] / f["filename"] for f in saved if f["type"] == "output"]
    assert files and all(path.stat().st_size > 0 for path in files)
    if name in ("ltx2_3_lora", "ltx2_5_lora"):
        (clip,) = (path for path in files if path.suffix == ".mp4" and path.parent.name == "video")
        with av.open(clip) as container:
            assert container.streams.audio
    assert "lora key not loaded" not in filled.log.read_text(encoding="utf-8", errors="replace")

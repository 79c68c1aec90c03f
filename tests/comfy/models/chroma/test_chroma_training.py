"""A tiny Chroma trains through the nodes: pictures prepared with its T5, compiled, swapped, cancelled and resumed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from comfy.model_management import InterruptProcessingException, interrupt_current_processing
from family_cases import CASES
from PIL import Image
from safetensors import safe_open
from tessera.data.folders.dataset import scan_images
from tessera.nodes.common.progress import ServerObserver
from tessera.nodes.model.compile import TesseraCompileModel
from tessera.nodes.train.train_lora import TesseraTrainLora
from tessera.train.config.settings import MemoryOptions
from tiny.data.encoders import load_chroma_clip
from tiny.data.preparing import prepare
from tiny.models.chroma import load_chroma
from tiny.nodes.prompt import executed
from tiny.train.learning import with_lora

STEPS = 3


@pytest.fixture
def file(case_file):
    return case_file(CASES["chroma"])


@pytest.fixture
def data(tiny_files, tiny_vae, tmp_path):
    """Three pictures of unlike shapes, with captions of 3 to 300 tokens."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index, (height, width) in enumerate(((64, 96), (96, 64), (80, 80))):
        pixels = np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text("a picture " * (index * 70 + 1))
    options = {"megapixels": 0.006, "max_graphs": 1, "fit": "ragged edge", "max_text_length": 512}
    with torch.inference_mode():
        clip = load_chroma_clip(tiny_files["t5"])
        return prepare(scan_images(folder), tiny_vae, clip, cache_dir=tmp_path / "cache", **options).data


@pytest.fixture
def train(file, data, monkeypatch):
    """Train LoRA's outputs on a fresh MODEL; `backend` puts Compile Model in front."""
    hidden = SimpleNamespace(unique_id="1", prompt=None, extra_pnginfo=None)
    monkeypatch.setattr(TesseraTrainLora, "hidden", hidden, raising=False)

    def run(name: str, backend: str | None = None, swap: int = 0):
        inputs = {"output_name": name, "steps": STEPS, "learning_rate": 1e-2, "rank": 4, "batch_size": 2, "seed": 1}
        inputs |= {
            "gradient_accumulation": 1,
            "save_every": 0,
            "resume": "latest",
            "compile": "auto" if backend else "off",
        }
        with torch.inference_mode():
            model = load_chroma(file)
            if backend:
                model = executed(TesseraCompileModel, model, backend=backend).args[0]
            memory = MemoryOptions(checkpointing="full", blocks_to_swap=swap)
            return executed(TesseraTrainLora, model=model, data=data, memory=memory, **inputs)

    return run


def test_captions_take_the_ladders_lengths_and_share_their_graphs(data):
    assert sorted({sample.text_length for sample in data.samples}) == [128, 256, 512]
    assert data.family == "Chroma"


def test_compiled_and_swapped_it_trains_the_same_lora(train, file):
    torch._dynamo.reset()
    plain, other = train("plain"), train("compiled", backend="eager", swap=3)
    (summary,) = other.ui["tessera"]
    assert summary["blocks_swapped"] == 3 and summary["graphs_compiled"] == summary["graphs_planned"] > 0
    lora, two = plain.args[0], other.args[0]
    assert lora.keys() == two.keys() and all(torch.equal(lora[name], two[name]) for name in lora)
    assert any(tensor.any() for name, tensor in lora.items() if name.endswith("lora_up.weight"))
    with safe_open(other.args[2], "pt") as saved:
        assert saved.metadata()["modelspec.architecture"] == "chroma/lora"
        assert saved.metadata()["ss_base_model_version"] == "chroma"
    model = load_chroma(file)
    patched = with_lora(model, SimpleNamespace(lora=lora))
    assert len(patched.patches) == summary["targets"] == 2 * 8 + 2 * 2


def test_a_cancelled_run_goes_on_to_the_same_lora(train, monkeypatch):
    settings = {"backend": "eager", "swap": 3}
    whole, tell = train("whole", **settings), ServerObserver.step

    def cancel(observer, report):
        tell(observer, report)
        if report.step == 2:
            interrupt_current_processing()

    with monkeypatch.context() as patch:
        patch.setattr(ServerObserver, "step", cancel)
        with pytest.raises(InterruptProcessingException):
            train("cancelled", **settings)
    resumed = train("cancelled", **settings)
    (summary,) = resumed.ui["tessera"]
    assert summary["steps_done"] == STEPS and "Resumed at step 2." in summary["notes"]
    assert resumed.args[1]["loss"] == whole.args[1]["loss"]
    lora, two = whole.args[0], resumed.args[0]
    assert lora.keys() == two.keys() and all(torch.equal(lora[name], two[name]) for name in lora)

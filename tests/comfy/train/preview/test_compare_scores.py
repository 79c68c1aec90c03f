"""Scores of the columns of Compare LoRAs: likeness and variety by a vision encoder, the validation loss of saves."""

import folder_paths
import numpy as np
import pytest
import torch
from PIL import Image
from tessera.data.folders.dataset import Dataset, scan_images
from tessera.lora.files.formats import save_lora
from tessera.lora.files.lora_model import LoraModel, LowRank
from tessera.nodes.loras import compare_scores
from tessera.nodes.loras.compare import TesseraCompareLoras
from tessera.train.preview import compare as module
from tessera.train.preview.contact_sheet import render_sheet
from tessera.train.preview.scores import ORDERS, Scores, best_first, likeness, variety
from tessera.train.runs.run_record import RunRecord
from tiny.data.image_encoders import load_clip_vision
from tiny.models.sampling import conditioning

RUN = "cats (001)"
SAMPLER = {"width": 64, "height": 48, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "seed": 4}
STEPS = (20, 100, 300)


@pytest.fixture(scope="module")
def saves(lora_folder):
    """A run with three saves, whose second has the lowest validation loss."""
    for step in STEPS:
        draw = torch.Generator().manual_seed(step)
        down, up = torch.randn(4, 128, generator=draw), 0.2 * torch.randn(384, 4, generator=draw)
        lora = LoraModel.from_modules({"double_blocks.0.img_attn.qkv": LowRank(down, up, 4.0)})
        save_lora(lora_folder / RUN / "cats_steps" / f"cats-step{step:06}.safetensors", lora)
    record = RunRecord(lora_folder / RUN, {})
    for step, loss in zip(STEPS, (0.5, 0.25, 0.75), strict=True):
        record.add("validation", step=step, loss=loss)
    record.end("finished", 300, "")
    folder_paths.filename_list_cache.clear()


@pytest.fixture(scope="module")
def vision():
    return load_clip_vision()


@pytest.fixture
def training_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_scores, "cache_folder", lambda: tmp_path / "cache")
    ramp = np.linspace(0, 255, 64 * 48 * 3, dtype=np.uint8).reshape(48, 64, 3)
    for number, pixels in enumerate((ramp, ramp[::-1].copy())):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text("a ramp")
    return scan_images(tmp_path)


@pytest.fixture
def headings(monkeypatch):
    found: list[list[str]] = []
    monkeypatch.setattr(module, "render_sheet", lambda *args: found.append(list(args[1])) or render_sheet(*args))
    return found


def run(model, vae, **changes):
    inputs = {"loras": "", "run": RUN, "strengths": "1", "without_lora": True, **SAMPLER, "seeds": 2, **changes}
    with torch.inference_mode():
        return TesseraCompareLoras.execute(model, vae, conditioning("flux", 16), **inputs)


def embedding(vision, image):
    with torch.inference_mode():
        row = vision.encode_image(image[None])["image_embeds"][0].double().numpy()
    return row / np.linalg.norm(row)


def cosines(first, second):
    return [float(a @ b) for a in first for b in second]


@pytest.mark.parametrize("order", ORDERS[:3])
def test_columns_are_scored_and_sorted_by_their_pictures(
    order, tiny_flux, tiny_vae, saves, vision, training_pictures, headings
):
    output = run(tiny_flux, tiny_vae, clip_vision=vision, training_pictures=training_pictures, sort_by=order)
    pictures, scores = output.result[1], output.ui["tessera"][0]["scores"]
    assert len(scores) == 4 and scores[0]["title"] == "without LoRA"
    training = [
        embedding(vision, torch.from_numpy(np.asarray(Image.open(entry.path, formats=["PNG"]), np.float32) / 255))
        for entry in training_pictures.entries
    ]
    for place, score in enumerate(scores):  # pictures come row by row, in the order of the columns
        drawn = [embedding(vision, pictures[place + row * 4][0]) for row in range(2)]
        assert score["likeness"] == pytest.approx(np.mean(cosines(drawn, training)), abs=1e-5)
        assert score["variety"] == pytest.approx(1 - float(drawn[0] @ drawn[1]), abs=1e-5)
    titles = [score["title"] for score in scores[1:]]
    listed = ["cats-step000020", "cats-step000100", "cats-step000300 (newest)"]
    values = [score.get(order) for score in scores[1:]]
    assert titles == listed if order == "as listed" else values == sorted(values, reverse=True)
    assert sorted(titles) == listed and {score["column"] for score in scores} == set(range(4))
    (names,) = headings
    assert names[1].startswith(f"{titles[0]}: likeness {scores[1]['likeness']:.3f}, variety ")


def test_saves_are_sorted_by_the_validation_loss_of_their_run(tiny_flux, tiny_vae, saves, headings):
    output = run(tiny_flux, tiny_vae, sort_by="validation loss", seeds=1)
    scores = output.ui["tessera"][0]["scores"]
    assert [score["validation"] for score in scores] == [None, 0.25, 0.5, 0.75]
    (names,) = headings
    assert names == [
        "without LoRA",
        "cats-step000100: validation loss 0.250",
        "cats-step000020: validation loss 0.500",
        "cats-step000300 (newest): validation loss 0.750",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sort_by": "likeness"}, "nothing to sort by; connect clip_vision and training_pictures"),
        ({"sort_by": "variety"}, "nothing to sort by; connect clip_vision"),
        ({"sort_by": "variety", "clip_vision": True, "seeds": 1}, "raise seeds to 2 or more"),
        ({"sort_by": "beauty"}, "sort_by is 'beauty'; choose one of as listed, likeness"),
        ({"training_pictures": Dataset(())}, "training_pictures is connected without clip_vision"),
        ({"training_pictures": Dataset(()), "clip_vision": True}, "training_pictures holds no pictures"),
    ],
)
def test_missing_inputs_of_an_order_are_said_before_anything_is_sampled(
    changes, message, tiny_flux, tiny_vae, saves, vision, monkeypatch
):
    monkeypatch.setattr(module, "sample_latents", lambda *_: pytest.fail("sampled"))
    if "clip_vision" in changes:
        changes = changes | {"clip_vision": vision}
    with pytest.raises(ValueError, match=message):
        run(tiny_flux, tiny_vae, **changes)


def test_validation_loss_needs_a_run_that_was_validated(tiny_flux, tiny_vae, lora_folder):
    lora = LoraModel.from_modules(
        {"double_blocks.0.img_attn.qkv": LowRank(torch.ones(4, 128), torch.ones(384, 4), 4.0)}
    )
    save_lora(lora_folder / "alone.safetensors", lora)
    folder_paths.filename_list_cache.clear()
    with pytest.raises(ValueError, match="choose a run that was trained with Training Validation"):
        run(tiny_flux, tiny_vae, loras="alone", run="none", sort_by="validation loss")


def test_columns_without_a_score_stand_behind_the_others():
    scores = [Scores(n, str(n), validation=loss) for n, loss in enumerate([None, None, 0.4, 0.2])]
    assert [score.column for score in best_first(scores, "validation loss", first=1)] == [0, 3, 2, 1]
    assert [score.column for score in best_first(scores, "as listed")] == [0, 1, 2, 3]


def test_scores_of_known_directions():
    east, north = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert variety(torch.stack([east, east])) == 0 and variety(torch.stack([east, north])) == 1
    assert variety(east[None]) is None and likeness(east[None], torch.stack([east, north])) == 0.5

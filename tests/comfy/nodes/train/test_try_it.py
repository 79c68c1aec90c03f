"""The workflow *Try it*: on a server with nothing but the pack it learns its pictures, and tells them apart."""

import numpy as np
import pytest
from comfy_server import DIRECT, PATIENCE, ComfyServer
from PIL import Image
from tiny.nodes.try_it import captions, load_prompt, sampled_each

STEPS = 400  # half of the workflow's: enough to tell what is learnt from what is not
# Correlations: own 0.65 to 0.85, others' and before training below 0.05 were measured; another CPU rounds otherwise.
LEARNT = 0.45
APART = 0.35
UNLEARNT = 0.2


@pytest.fixture(scope="module")
def trained(tmp_path_factory, own_comfyui):
    """(prompt, outputs of its nodes, picture nodes with and without the LoRA, the server)."""
    env = {"OMP_NUM_THREADS": "1", "TESSERA_OPENS": "try_it"}
    with ComfyServer(tmp_path_factory.mktemp("bare"), own_comfyui, env=env) as server:
        prompt, keys = sampled_each(load_prompt(steps=STEPS))
        outputs = server.run(prompt, timeout=4 * PATIENCE)["outputs"]
        yield prompt, outputs, keys, server


@pytest.fixture(scope="module")
def own_comfyui():
    from tessera_dev import find_comfyui

    return find_comfyui()


def pixels(file) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB").resize((128, 128)), float).ravel()


def picture(server: ComfyServer, outputs: dict, key: str) -> np.ndarray:
    (image,) = outputs[key]["images"]
    return pixels(server.base / image["type"] / image["subfolder"] / image["filename"])


def likeness(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.corrcoef(first, second)[0, 1])


def test_the_page_of_dev_serve_opens_with_it_once(trained):
    *_, server = trained
    with DIRECT.open(server.url) as first, DIRECT.open(server.url) as second:
        assert first.url == f"{server.url}/?template=try_it&source=tessera"
        assert second.url.rstrip("/") == server.url


def test_each_caption_gives_its_own_picture_and_none_before_training(trained):
    _, outputs, keys, server = trained
    originals = {name: pixels(file) for name, (file, _) in captions().items()}
    assert len(originals) == 3
    for name, key in keys["with"].items():
        sampled = picture(server, outputs, key)
        like = {other: likeness(sampled, original) for other, original in originals.items()}
        own_likeness = like.pop(name)
        untrained = likeness(picture(server, outputs, keys["without"][name]), originals[name])
        assert own_likeness > LEARNT and own_likeness > max(like.values()) + APART and untrained < UNLEARNT, (
            name,
            own_likeness,
            like,
            untrained,
        )


def test_the_previews_become_the_picture_and_the_loss_falls(trained):
    prompt, outputs, _, server = trained
    key = next(key for key, node in prompt.items() if node["class_type"] == "TesseraTrainLora")
    (summary,) = outputs[key]["tessera"]
    loss = summary["loss"]
    assert len(loss) == STEPS and np.mean(loss[-40:]) < 0.6 * np.mean(loss[:40])
    boat = pixels(captions()["boat"][0])
    files = sorted(server.base.joinpath("output").rglob("previews/*.png"))
    like = [likeness(pixels(file), boat) for file in files if file.stem != "sheet"]
    assert len(like) >= STEPS // 100 and like[0] < UNLEARNT and max(like) > LEARNT, (files, like)

"""Mask Folder by core's own nodes, with models whose answers are known."""

import folder_paths
import numpy as np
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfy_extras.nodes_bg_removal import RemoveBackground
from comfy_extras.nodes_sam3 import SAM3_Detect
from PIL import Image
from tessera.nodes.review import mask_folder
from tessera.nodes.review.mask_folder import TesseraMaskFolder

CORE = {"SAM3_Detect": SAM3_Detect, "RemoveBackground": RemoveBackground}


class Left:
    """A background removal model that takes the left half for a thing."""

    def encode_image(self, image):
        mask = torch.zeros(image.shape[:3])
        mask[:, :, : image.shape[2] // 2] = 1
        return mask


class Finder(torch.nn.Module):
    """SAM3 as core's SAM3 Detect calls it: it finds the upper half, with a score of 0.7."""

    def forward(self, frame, text_embeddings, text_mask, boxes, threshold, orig_size):
        height, width = orig_size
        masks = torch.full((1, 1, 64, 64), -9.0)
        masks[:, :, :32] = 9.0
        found = torch.tensor([[[0.0, 0.0, width, height / 2]]])
        return {"boxes": found, "scores": torch.full((1, 1), 0.7).logit(), "masks": masks}

    def forward_segment(self, frame, mask_inputs):
        return torch.nn.functional.interpolate(mask_inputs, size=frame.shape[-2:])


class Sam3(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.diffusion_model = Finder()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def get_dtype(self):
        return torch.float32


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Two pictures in ComfyUI's input folder; the second has a mask."""
    monkeypatch.setattr(folder_paths, "input_directory", str(tmp_path / "input"))
    monkeypatch.setattr(mask_folder, "core_node", CORE.get)
    folder = tmp_path / "input" / "photos"
    (folder / "masks").mkdir(parents=True)
    for name in ("a", "b"):
        Image.new("RGB", (40, 60), "red").save(folder / f"{name}.png")
    Image.new("L", (40, 60), 9).save(folder / "masks" / "b.png")
    return folder


def run(**inputs):
    return TesseraMaskFolder.PREPARE_CLASS_CLONE(None).execute(folder="input/photos", **inputs).result[0]


def mask(folder, name):
    return np.asarray(Image.open(folder / "masks" / f"{name}.png"))


def test_a_background_is_masked_and_masks_that_are_there_stay(photos):
    assert run(bg_removal_model=Left()) == "1 of 2 pictures got a mask; 1 had one."
    assert mask(photos, "a")[:, :20].min() == 255 and mask(photos, "a")[:, 20:].max() == 0
    assert mask(photos, "b").max() == 9
    assert run(bg_removal_model=Left(), overwrite=True) == "2 of 2 pictures got a mask; 0 had one."
    assert mask(photos, "b").max() == 255


def test_a_prompt_finds_what_is_learnt(photos):
    model = ModelPatcher(Sam3(), torch.device("cpu"), torch.device("cpu"))
    prompt = [[torch.zeros(1, 4, 8), {}]]
    told = run(model=model, conditioning=prompt, threshold=0.8)
    assert told.splitlines()[1] == "Nothing was found in these, so they have none: a.png."
    assert run(model=model, conditioning=prompt) == "1 of 2 pictures got a mask; 1 had one."
    assert mask(photos, "a").shape == (60, 40)
    assert mask(photos, "a")[:28].min() == 255 and mask(photos, "a")[32:].max() == 0


def test_missing_connections_and_files_are_named(photos, monkeypatch):
    with pytest.raises(ValueError, match="Neither model nor bg_removal_model is connected"):
        run()
    with pytest.raises(ValueError, match="conditioning is not connected"):
        run(model=object())
    with pytest.raises(ValueError, match="disconnect one of them"):
        run(model=object(), bg_removal_model=Left())
    monkeypatch.setattr(mask_folder, "core_node", lambda name: None)
    with pytest.raises(ValueError, match="This ComfyUI has no node RemoveBackground; update ComfyUI"):
        run(bg_removal_model=Left())
    monkeypatch.setattr(folder_paths, "input_directory", str(photos / "elsewhere"))
    monkeypatch.setattr(mask_folder, "resolve_folder", lambda choice: photos)
    with pytest.raises(ValueError, match="only inside ComfyUI's input folder"):
        run(bg_removal_model=Left())

"""What Prepare Dataset makes of pictures, clips, start pictures and control pictures is what each family trains on."""

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from tessera.data.folders.dataset import scan_images, scan_videos
from tessera.data.media.clip_windows import Extraction
from tessera.data.prepare import prepare
from tiny.films import write_film
from tiny.image_encoders import (
    load_clip_vision,
    load_flux2_vae,
    load_klein_clip,
    load_mistral_clip,
    load_seeing_qwen_clip,
    load_wan22_vae,
)
from tiny.runs import train


@pytest.fixture
def folders(tmp_path):
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


def prepared(dataset, vae, clip, folders, **options):
    defaults = {"megapixels": 0.006, "max_graphs": 1, "fit": "ragged edge", "max_text_length": 512}
    defaults |= {"control_megapixels": 0.0046875, "cache_dir": folders / "cache"}
    with torch.inference_mode():
        return prepare(dataset, vae, clip, **{**defaults, **options}).data


def losses(model, data, folders):
    steps = 2 * len(data.graph_keys())
    result = train(model, data, folders / "run", steps=steps, batch_size=2)
    assert len(result.loss) == steps and all(np.isfinite(result.loss))
    return result


@pytest.mark.parametrize("variant", ["2.1-t2v", "2.1-i2v", "2.2-i2v-14b", "2.2-5b"])
def test_wan_trains_on_clips_and_pictures(folders, tiny_files, variant):
    vae = load_wan22_vae() if variant == "2.2-5b" else tiny.load_vae(tiny_files["wan_vae"])
    films = scan_videos(folders / "films", Extraction((5, 9)))
    led = variant != "2.1-t2v"
    dataset = films if "i2v" in variant else films + scan_images(folders / "after")
    data = prepared(
        dataset,
        vae,
        tiny.load_wan_clip(tiny_files["umt5"]),
        folders,
        megapixels=0.012 if variant == "2.2-5b" else 0.003,
        image_to_video=led,
        clip_vision=load_clip_vision(1280) if variant == "2.1-i2v" else None,
    )
    assert len(data.graph_keys()) == (2 if "i2v" in variant else 3)
    model = tiny.load_wan(tiny.write_wan(folders / "wan.safetensors", variant=variant))
    losses(model, data, folders)


@pytest.mark.parametrize("controls", [False, True])
def test_qwen_image_trains_on_pictures_with_and_without_control_pictures(folders, tiny_files, controls):
    dataset = scan_images(folders / "after", control_folder=folders / "before" if controls else None)
    vae, clip = tiny.load_vae(tiny_files["wan_vae"]), load_seeing_qwen_clip(tiny_files["qwen"])
    data = prepared(dataset, vae, clip, folders)
    assert {len(sample.references) for sample in data.samples} == {int(controls)}
    losses(tiny.load_qwen_image(tiny_files["qwen_image"]), data, folders)


def test_flux_kontext_trains_on_pictures_with_control_pictures(folders, tiny_flux, tiny_vae, tiny_clip):
    dataset = scan_images(folders / "after", control_folder=folders / "before")
    losses(tiny_flux, prepared(dataset, tiny_vae, tiny_clip, folders), folders)


@pytest.mark.parametrize("load", [load_klein_clip, load_mistral_clip])
def test_flux_2_trains_on_pictures_with_control_pictures(folders, load):
    dataset = scan_images(folders / "after", control_folder=folders / "before")
    data = prepared(dataset, load_flux2_vae(), load(), folders)
    assert {sample.text_length for sample in data.samples} == {512}
    model = tiny.load_flux2(tiny.write_flux2(folders / "flux2.safetensors", context_dim=96))
    losses(model, data, folders)

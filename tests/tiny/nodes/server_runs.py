"""Runs of Train LoRA on two pictures, as a server's prompt, and a run held at a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from comfy_server import PATIENCE
from PIL import Image

from .prompt import node

STEPS = 40


def put_pictures(base: Path) -> None:
    """Put two pictures of different shape into a server's input folder."""
    for index, size in enumerate([(64, 96), (96, 64)]):
        picture = Image.new("RGB", size, (200, 80 * index, 30))
        picture.paste((10, 60, 220), (8, 8, 40, 56))
        picture.save(base / "input" / f"picture{index}.png")


def training_graph(loaders: dict[str, Any], name: str = "run", **changes: Any) -> dict[str, Any]:
    """Core's loaders and encoders → Latents to Training Data → Train LoRA."""
    train = {"output_name": name, "steps": STEPS, "learning_rate": 1e-3, "rank": 4, "batch_size": 1}
    train |= {"gradient_accumulation": 2, "seed": 5, "compile": "off", "save_every": 2, "resume": "latest"}
    return loaders | {
        "image0": node("LoadImage", image="picture0.png"),
        "image1": node("LoadImage", image="picture1.png"),
        "latent0": node("VAEEncode", pixels=["image0", 0], vae=["vae", 0]),
        "latent1": node("VAEEncode", pixels=["image1", 0], vae=["vae", 0]),
        "latents": node("CreateList", **{"inputs.input0": ["latent0", 0], "inputs.input1": ["latent1", 0]}),
        "positive": node("CLIPTextEncode", clip=["clip", 0], text="a blue sign on a red wall"),
        "data": node("TesseraLatentsToDataset", latents=["latents", 0], positive=["positive", 0], max_graphs=1),
        "train": node("TesseraTrainLora", model=["model", 0], data=["data", 0], **(train | changes)),
    }


@contextmanager
def paused_at(server: Any, step: int) -> Iterator[None]:
    """No run goes on after this step meanwhile, so that what breaks in comes in time."""
    hold = server.base / "hold"
    (beside := server.base / "hold.new").write_text(str(step))
    beside.replace(hold)
    try:
        yield
    finally:
        hold.unlink()


def newest_step(server: Any, name: str) -> int:
    states = (server.base / "output" / "loras").glob(f"{name} (*)/state-*.tessera")
    return max((int(path.stem.removeprefix("state-")) for path in states), default=0)


def wait_for_step(server: Any, name: str, step: int, prompt_id: str) -> None:
    end = time.monotonic() + PATIENCE
    while newest_step(server, name) < step:
        assert time.monotonic() < end and server.history(prompt_id) is None, server.log_tail()
        time.sleep(0.01)

"""The demo: trains the workflow *Try it* in a real ComfyUI and samples each of its pictures with and without the LoRA.

Run it with `python dev.py demo`, which finds or makes the environment.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import struct
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from photos import write_photos
from PIL import Image, ImageDraw, ImageFont
from server import ComfyServer, error_of
from tiny import write_models
from tiny.data.films import write_film
from tiny.models.ltx import write_distilled
from tiny.native.workflow import CASES, CLIPS, fitted
from tiny.nodes.prompt import node
from tiny.nodes.try_it import captions, load_prompt, sampled_each

ROOT = Path(__file__).resolve().parent.parent
TEXT_EVENT = 3
PICTURED = (0, 100, 200, 400, 600, 800)  # steps whose previews the README shows


async def run_with_progress(server: ComfyServer, prompt: dict[str, Any]) -> dict[str, Any]:
    """Queue a prompt and print each node and its progress until the prompt ends; return its history entry."""
    client = uuid.uuid4().hex
    url = f"{server.url.replace('http', 'ws')}/ws?clientId={client}"
    async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as socket:
        prompt_id = server.queue(prompt, client)
        printed = Printer()
        async for message in socket:
            if message.type == aiohttp.WSMsgType.BINARY:
                (event,) = struct.unpack(">I", message.data[:4])
                if event == TEXT_EVENT:
                    (length,) = struct.unpack(">I", message.data[4:8])
                    printed.progress(message.data[8 + length :].decode())
            elif message.type == aiohttp.WSMsgType.TEXT:
                event = json.loads(message.data)
                data = event.get("data", {})
                if event["type"] == "executing" and data.get("prompt_id") == prompt_id:
                    if data["node"] is None:
                        break
                    printed.line(name_of(prompt[data["node"]]))
                elif event["type"] in ("execution_error", "execution_interrupted"):
                    break
            else:
                break
        printed.end()
    entry = server.wait(prompt_id)
    if entry["status"]["status_str"] != "success":
        raise SystemExit(f"{error_of(entry)}\n{server.log_tail()}")
    return entry


def name_of(node_data: dict[str, Any]) -> str:
    """Name of a node as the browser shows it."""
    title: str = node_data.get("_meta", {}).get("title", node_data["class_type"])
    return title


def tell(line: str) -> None:
    """Print ComfyUI's progress while it starts."""
    print(f"  {line}", flush=True)


class Printer:
    """Progress in one line on a terminal, now and then as a line of its own elsewhere."""

    def __init__(self) -> None:
        self.terminal = sys.stdout.isatty()
        self.open = False
        self.last = 0.0

    def line(self, text: str) -> None:
        self.end()
        print(f"  {text}", flush=True)

    def progress(self, text: str) -> None:
        if self.terminal:
            print(f"\r    {text[:110]:<110}", end="", flush=True)
            self.open = True
        elif time.monotonic() - self.last > 3:
            print(f"    {text}", flush=True)
            self.last = time.monotonic()

    def end(self) -> None:
        if self.open:
            print()
            self.open = False


def pictures_of(server: ComfyServer, entry: dict[str, Any]) -> dict[str, Path]:
    """node id: file of the first picture that it shows."""
    files = {}
    for key, output in entry["outputs"].items():
        for image in output.get("images", [])[:1]:
            files[key] = server.base / image["type"] / image["subfolder"] / image["filename"]
    return files


def draw_sheet(rows: dict[str, dict[str, Path]], cell: int = 256) -> Image.Image:
    """Draw rows of pictures by title. cell: pixels of a picture's side."""
    label, margin = 24, 8
    font = ImageFont.load_default(15)
    (first, *_) = rows.values()
    sheet = Image.new("RGB", (len(first) * (cell + margin) + margin, len(rows) * (cell + label) + margin), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (title, files) in enumerate(rows.items()):
        for column, (name, file) in enumerate(files.items()):
            x, y = margin + column * (cell + margin), row * (cell + label)
            draw.text((x, y + 4), f"{name}, {title}" if title else name, "black", font)
            with Image.open(file) as image:
                sheet.paste(image.convert("RGB").resize((cell, cell), Image.Resampling.BICUBIC), (x, y + label))
    return sheet


def add_loss_plot(prompt: dict[str, Any]) -> str:
    """Put Loss Plot behind Train LoRA; returns the key of that node."""
    (train,) = (key for key, node_data in prompt.items() if node_data["class_type"] == "TesseraTrainLora")
    plot = node("TesseraLossPlot", loss=[train, 1], smoothing=0.9, log_scale=False)
    prompt["loss plot"] = plot | {"_meta": {"title": "Loss Plot"}}
    return train


def keep(server: ComfyServer, outputs: dict[str, Path], summary: dict[str, Any], lora: Path, plot: Path) -> None:
    """Copy LoRA and loss plot to the results. Raises SystemExit if ComfyUI did not know every key of the LoRA."""
    if "lora key not loaded" in server.log.read_text(errors="replace"):
        raise SystemExit(f"ComfyUI did not know every key of the LoRA.\n{server.log_tail()}")
    shutil.copy(server.base / "output" / summary["path"], lora)
    shutil.copy(outputs["loss plot"], plot)


def print_loss(summary: dict[str, Any]) -> None:
    loss = summary["loss"]
    tenth = max(1, len(loss) // 10)
    print(
        f"Mean loss of the first tenth {sum(loss[:tenth]) / tenth:.3f}, of the last {sum(loss[-tenth:]) / tenth:.3f}."
    )


def run_demo(comfyui: Path, base: Path, results: Path, cpu: bool) -> None:
    shutil.rmtree(base / "output", ignore_errors=True)
    prompt = load_prompt()
    train_node = add_loss_plot(prompt)
    results.mkdir(parents=True, exist_ok=True)
    print("Starting ComfyUI …", flush=True)
    with ComfyServer(base, comfyui, cpu=cpu, tell=tell) as server:
        print(f"Training on {len(captions())} pictures, {prompt[train_node]['inputs']['steps']} steps:")
        trained = asyncio.run(run_with_progress(server, prompt))
        (summary,) = trained["outputs"][train_node]["tessera"]
        print("Sampling each picture without and with the LoRA through core's KSampler:")
        sampling, savers = sampled_each(load_prompt())
        pictures = pictures_of(server, asyncio.run(run_with_progress(server, sampling)))
        keep(server, pictures_of(server, trained), summary, results / "demo.safetensors", results / "loss.png")
        rows = {"trained on": {name: file for name, (file, _) in captions().items()}}
        rows |= {
            f"{words} the LoRA": {name: pictures[key] for name, key in nodes.items()} for words, nodes in savers.items()
        }
        draw_sheet(rows).save(results / "sheet.png")
        if folder := os.environ.get("TESSERA_PICTURES"):  # the README's
            previews = (base / "output" / summary["path"]).parent / "previews"
            row = {f"step {step}": previews / f"step{step:06d}_0.png" for step in PICTURED}
            draw_sheet({"": row}, 192).save(Path(folder) / "try_it.png", optimize=True)
    print_loss(summary)
    print(f"LoRA:              {results / 'demo.safetensors'}")
    print(f"Loss plot:         {results / 'loss.png'}")
    print(f"Sheet of pictures: {results / 'sheet.png'}")


def write_clips(photos: dict[str, tuple[Path, str]], folder: Path) -> None:
    """Make a clip of each photograph, over which the view moves to the right."""
    folder.mkdir(parents=True, exist_ok=True)
    width = 160
    height = 96
    frames = 17
    for name, (file, caption) in photos.items():
        with Image.open(file) as image:
            picture = np.asarray(image.convert("RGB").resize((width + frames - 1, height)))
        views = [picture[:, frame : frame + width] for frame in range(frames)]
        write_film(folder / f"{name}.mp4", views, fps=24, size=(height, width), caption=caption)


def run_native_demo(comfyui: Path, base: Path, results: Path, cpu: bool, model: str) -> None:
    """Queue the shared workflow of this model on its tiny twin, whose weights are random: it shows the way, and the
    loss, not a likeness."""
    shutil.rmtree(base / "output", ignore_errors=True)
    photos = write_photos(base / "input" / "tessera_demo")
    workflow = next(name for name, tiny in CASES.items() if tiny == model)
    folder, contents = "input/tessera_demo", f"{len(photos)} photographs"
    if workflow in CLIPS:
        folder, contents = "input/tessera_demo_clips", f"{len(photos)} clips"
        write_clips(photos, base / folder)
    settings = {"output_name": "demo", "steps": 60, "learning_rate": 1e-3, "batch_size": 2}
    if model == "ltx-2.3":
        write_distilled(base / "models" / "loras")
    prompt = fitted(workflow, folder, **settings, compile="off" if cpu else "auto")
    train_node = add_loss_plot(prompt)
    lora, plot = results / f"{model}.safetensors", results / f"{model}_loss.png"
    results.mkdir(parents=True, exist_ok=True)
    print("Starting ComfyUI …", flush=True)
    with ComfyServer(base, comfyui, cpu=cpu, tell=tell) as server:
        print(f"Training a tiny {model} on {contents}, {settings['steps']} steps:")
        entry = asyncio.run(run_with_progress(server, prompt))
        (summary,) = entry["outputs"][train_node]["tessera"]
        keep(server, pictures_of(server, entry), summary, lora, plot)
    print_loss(summary)
    print(f"LoRA:      {lora}")
    print(f"Loss plot: {plot}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    models = commands.add_parser("models", help="write the tiny models")
    models.add_argument("folder", type=Path)
    run = commands.add_parser("run", help="run the demo")
    run.add_argument("comfyui", type=Path)
    run.add_argument("base", type=Path)
    run.add_argument("results", type=Path)
    run.add_argument("--cpu", action="store_true")
    run.add_argument("--model", choices=("flux", *CASES.values()), default="flux", help="the tiny model to train")
    options = parser.parse_args()
    # Stop the server too if a signal ends this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.command == "models":
        write_models(options.folder)
    elif options.model == "flux":
        run_demo(options.comfyui, options.base, options.results, options.cpu)
    else:
        run_native_demo(options.comfyui, options.base, options.results, options.cpu, options.model)


if __name__ == "__main__":
    main()

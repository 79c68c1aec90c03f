"""The demo: trains a LoRA on a tiny FLUX in a real ComfyUI and samples with and without it.

Run it with `python dev.py demo`, which finds or makes the environment.
"""

import argparse
import asyncio
import json
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
from PIL import Image, ImageDraw
from server import ComfyServer, error_of
from tiny import write_models
from tiny.films import write_film
from tiny.native.workflow import CASES, CLIPS, fitted
from tiny.prompt import node
from tiny.workflow import fit_workflow

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = ROOT / "workflows" / "api" / "flux_lora.json"
SETTINGS = {"output_name": "demo", "steps": 300, "learning_rate": 3e-3, "rank": 32, "batch_size": 4}
SHOWN = {"cat": (320, 208), "astronaut": (224, 288), "temple": (352, 176)}  # name: (width, height) to sample at
TEXT_EVENT = 3


async def run_with_progress(server: ComfyServer, prompt: dict[str, Any]) -> dict[str, Any]:
    """Queues a prompt and prints each node and its progress until the prompt ends; returns its history entry."""
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
                    printed.line(prompt[data["node"]]["class_type"])
                elif event["type"] in ("execution_error", "execution_interrupted"):
                    break
            else:
                break
        printed.end()
    entry = server.wait(prompt_id)
    if entry["status"]["status_str"] != "success":
        raise SystemExit(f"{error_of(entry)}\n{server.log_tail()}")
    return entry


def tell(line: str) -> None:
    """Prints what ComfyUI does while it starts."""
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


def sampling_prompt(names: dict[str, str], photos: dict[str, tuple[Path, str]], lora: str | None) -> dict[str, Any]:
    """Core nodes only: a picture for each caption of SHOWN, with or without the LoRA."""

    prompt = {
        "base": node("UNETLoader", unet_name=names["unet_name"], weight_dtype="default"),
        "clip": node("TesseraTinyClipLoader", clip_name1=names["clip_name1"], clip_name2=names["clip_name2"]),
        "vae": node("VAELoader", vae_name=names["vae_name"]),
    }
    model = "base"
    if lora is not None:
        model = "lora"
        prompt["lora"] = node("LoraLoaderModelOnly", model=["base", 0], lora_name=lora, strength_model=1.0)
    for name, (width, height) in SHOWN.items():
        prompt[f"{name} text"] = node("CLIPTextEncode", clip=["clip", 0], text=photos[name][1])
        prompt[f"{name} guided"] = node("FluxGuidance", conditioning=[f"{name} text", 0], guidance=1.0)
        prompt[f"{name} empty"] = node("EmptySD3LatentImage", width=width, height=height, batch_size=1)
        prompt[f"{name} latent"] = node(
            "KSampler",
            model=[model, 0],
            positive=[f"{name} guided", 0],
            negative=[f"{name} guided", 0],
            latent_image=[f"{name} empty", 0],
            seed=7,
            steps=20,
            cfg=1.0,
            sampler_name="euler",
            scheduler="simple",
            denoise=1.0,
        )
        prompt[f"{name} picture"] = node("VAEDecode", samples=[f"{name} latent", 0], vae=["vae", 0])
        prompt[name] = node("SaveImage", images=[f"{name} picture", 0], filename_prefix=f"demo_{name}_{model}")
    return prompt


def pictures_of(server: ComfyServer, entry: dict[str, Any]) -> dict[str, Path]:
    """node id: file of the first picture that it shows."""
    found = {}
    for key, output in entry["outputs"].items():
        for image in output.get("images", [])[:1]:
            found[key] = server.base / image["type"] / image["subfolder"] / image["filename"]
    return found


def draw_sheet(photos: dict[str, tuple[Path, str]], rows: dict[str, dict[str, Path]]) -> Image.Image:
    cell, label, margin = 300, 24, 8
    titles = {"trained on": {name: photos[name][0] for name in SHOWN}} | rows
    sheet = Image.new("RGB", (len(SHOWN) * (cell + margin) + margin, len(titles) * (cell + label) + margin), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (title, files) in enumerate(titles.items()):
        for column, name in enumerate(SHOWN):
            x, y = margin + column * (cell + margin), row * (cell + label)
            draw.text((x, y + 6), f"{name}, {title}", fill="black")
            with Image.open(files[name]) as image:
                picture = image.convert("RGB")
            picture.thumbnail((cell, cell))
            sheet.paste(picture, (x, y + label))
    return sheet


def add_loss_plot(prompt: dict[str, Any]) -> None:
    """Put Loss Plot behind Train LoRA."""
    (train,) = (key for key, each in prompt.items() if each["class_type"] == "TesseraTrainLora")
    prompt["loss plot"] = node("TesseraLossPlot", loss=[train, 1], smoothing=0.9, log_scale=False)


def run_demo(comfyui: Path, base: Path, results: Path, cpu: bool) -> None:
    shutil.rmtree(base / "output", ignore_errors=True)
    names = write_models(base / "models")
    photos = write_photos(base / "input" / "tessera_demo")
    # Compiling takes a CPU longer than the whole training of the tiny model.
    settings = SETTINGS | {"compile": "off" if cpu else "auto"}
    prompt = fit_workflow(json.loads(WORKFLOW.read_text(encoding="utf-8")), names, "input/tessera_demo", **settings)
    add_loss_plot(prompt)
    results.mkdir(parents=True, exist_ok=True)
    print("Starting ComfyUI …", flush=True)
    with ComfyServer(base, comfyui, cpu=cpu, tell=tell) as server:
        print(f"Training on {len(photos)} photographs, {settings['steps']} steps, compile {settings['compile']}:")
        trained = asyncio.run(run_with_progress(server, prompt))
        train_node = next(key for key, node in prompt.items() if node["class_type"] == "TesseraTrainLora")
        (summary,) = trained["outputs"][train_node]["tessera"]
        loras = base / "output" / "loras"
        lora = base / "output" / summary["path"]
        print("Sampling without and with the LoRA through core's loader and KSampler:")
        rows = {}
        for title, name in (("without the LoRA", None), ("with the LoRA", lora.relative_to(loras))):
            sampling = sampling_prompt(names, photos, None if name is None else str(name))
            rows[title] = pictures_of(server, asyncio.run(run_with_progress(server, sampling)))
        if "lora key not loaded" in server.log.read_text(errors="replace"):
            raise SystemExit(f"ComfyUI did not know every key of the LoRA.\n{server.log_tail()}")
        plots = [
            path
            for node, path in pictures_of(server, trained).items()
            if prompt[node]["class_type"] == "TesseraLossPlot"
        ]
        shutil.copy(lora, results / "demo.safetensors")
        for path in plots[:1]:
            shutil.copy(path, results / "loss.png")
    draw_sheet(photos, rows).save(results / "sheet.png")
    loss = summary["loss"]
    tenth = max(1, len(loss) // 10)
    print(
        f"Mean loss of the first tenth {sum(loss[:tenth]) / tenth:.3f}, of the last {sum(loss[-tenth:]) / tenth:.3f}."
    )
    print(f"LoRA:              {results / 'demo.safetensors'}")
    print(f"Loss plot:         {results / 'loss.png'}")
    print(f"Sheet of pictures: {results / 'sheet.png'}")


def write_clips(photos: dict[str, tuple[Path, str]], folder: Path) -> None:
    """Make a clip of each photograph, over which the view moves to the right."""
    folder.mkdir(parents=True, exist_ok=True)
    width, height, frames = 160, 96, 17
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
    prompt = fitted(workflow, folder, **settings, compile="off" if cpu else "auto")
    add_loss_plot(prompt)
    results.mkdir(parents=True, exist_ok=True)
    print("Starting ComfyUI …", flush=True)
    with ComfyServer(base, comfyui, cpu=cpu, tell=tell) as server:
        print(f"Training a tiny {model} on {contents}, {settings['steps']} steps:")
        entry = asyncio.run(run_with_progress(server, prompt))
        train_node = next(key for key, node in prompt.items() if node["class_type"] == "TesseraTrainLora")
        (summary,) = entry["outputs"][train_node]["tessera"]
        if "lora key not loaded" in server.log.read_text(errors="replace"):
            raise SystemExit(f"ComfyUI did not know every key of the LoRA.\n{server.log_tail()}")
        shutil.copy(base / "output" / summary["path"], results / f"{model}.safetensors")
        for node, path in pictures_of(server, entry).items():
            if prompt[node]["class_type"] == "TesseraLossPlot":
                shutil.copy(path, results / f"{model}_loss.png")
    loss = summary["loss"]
    tenth = max(1, len(loss) // 10)
    print(
        f"Mean loss of the first tenth {sum(loss[:tenth]) / tenth:.3f}, of the last {sum(loss[-tenth:]) / tenth:.3f}."
    )
    print(f"LoRA:      {results / f'{model}.safetensors'}")
    print(f"Loss plot: {results / f'{model}_loss.png'}")


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
    # Ends with the server's own end, also where a runner ends this process by a signal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.command == "models":
        write_models(options.folder)
    elif options.model == "flux":
        run_demo(options.comfyui, options.base, options.results, options.cpu)
    else:
        run_native_demo(options.comfyui, options.base, options.results, options.cpu, options.model)


if __name__ == "__main__":
    main()

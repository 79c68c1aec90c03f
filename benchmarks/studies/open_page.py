"""A step of Train LoRA with ComfyUI's page open in a browser, beside the same step with none: by turns on one server.

    python benchmarks open_page [--rounds 6] [--steps 200] [--new-renderer] > benchmarks/results/open_page_cpu.md

- page: open in headless Chromium, it shows the node with its panel and queued the run, so that it gets all events.
- bare page: the same without our scripts, so that what ComfyUI's own frontend draws of a run is known by itself.
- listener: a small program in its place, which hears the events of the run that it queued and asks for the curve once a
  second, as the page does, but draws nothing. What it costs is what the server does for a page.
- none: the run is queued by the API, and nobody looks.

A node pack of its own notes when each step ends. On Linux the server is kept to the first core and the browser to the
others.
"""

import argparse
import asyncio
import json
import math
import os
import platform
import re
import sys
import tempfile
import threading
import time
import uuid
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
import aiohttp  # noqa: E402
from comfyui import load_tiny_writers  # noqa: E402
from processes import processor  # noqa: E402
from with_pack import comfy_server, dev  # noqa: E402

CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
PATIENCE = 600.0  # seconds that a run may take
SETTLE = 3.0  # seconds that a page gets before its run begins
SIDE = 256  # pixels of the picture
# The seconds of each step, and the CPU seconds of the server until then, once the last step is done.
CLOCK = """
import json, time
from pathlib import Path
import comfy.utils, folder_paths
NODE_CLASS_MAPPINGS = {}
_update, _noted = comfy.utils.ProgressBar.update_absolute, []
def update(self, value, *args, **kwargs):
    _update(self, value, *args, **kwargs)
    _noted.append((time.perf_counter(), time.process_time()))
    if value == self.total and len(_noted) > 9:
        beside = Path(folder_paths.base_path, "noted.new")
        beside.write_text(json.dumps(_noted))
        beside.replace(Path(folder_paths.base_path, "noted.json"))
        _noted.clear()
comfy.utils.ProgressBar.update_absolute = update
"""
READY = "!!(window.app?.graph && window.LiteGraph?.registered_node_types.TesseraTrainLora) && !!app.api.clientId"
STARTED = "app.graph.nodes.length > 0 && !document.querySelector('.p-blockui-mask')"
CENTER = "app.canvas.centerOnNode(app.graph.nodes.find((n) => n.type === 'TesseraTrainLora'))"
OUR_SCRIPTS = re.compile(r"/extensions/[^/]*tessera[^/]*/.*\.js", re.IGNORECASE)
POINTS = "document.querySelector('.tessera-run svg')?.getAttribute('aria-label')"


def prompt(name: str, steps: int) -> dict[str, Any]:
    from tiny.nodes.prompt import node

    train = {"output_name": name, "steps": steps, "learning_rate": 1e-3, "rank": 4, "batch_size": 1, "seed": 0}
    train |= {"gradient_accumulation": 1, "compile": "off", "save_every": 0, "resume": "off"}
    return {
        "1": node("UNETLoader", unet_name="tiny_flux.safetensors", weight_dtype="default"),
        "2": node("TesseraTinyClipLoader", clip_name1="tiny_clip_l.safetensors", clip_name2="tiny_t5xxl.safetensors"),
        "3": node("EmptySD3LatentImage", width=SIDE, height=SIDE, batch_size=1),
        "4": node("CLIPTextEncode", clip=["2", 0], text="a fox"),
        "5": node("TesseraLatentsToDataset", latents=["3", 0], positive=["4", 0], max_graphs=1),
        "6": node("TesseraTrainLora", model=["1", 0], data=["5", 0], **train),
    }


def noted(base: Path) -> tuple[float, float]:
    """Wait for the end of a run. Returns the median seconds of a step, and the server's mean CPU seconds of one."""
    file, end = base / "noted.json", time.monotonic() + PATIENCE
    while not file.is_file():  # the server is not asked: it would have to answer
        if time.monotonic() > end:
            raise SystemExit("The run did not end in time.")
        time.sleep(0.2)
    times = json.loads(file.read_text())
    file.unlink()
    walls = [following[0] - previous[0] for previous, following in zip(times, times[1:], strict=False)]
    return median(walls), (times[-1][1] - times[0][1]) / len(walls)


def with_page(context: Any, server: Any, name: str, steps: int, bare: bool = False) -> tuple[float, float]:
    page = context.new_page()
    if bare:
        page.route(OUR_SCRIPTS, lambda route: route.abort())
    page.goto(server.url)
    page.wait_for_function(READY)
    page.wait_for_function(STARTED)
    graph = prompt(name, steps)
    page.evaluate("prompt => app.loadApiJson(prompt, 'measured')", graph)
    page.wait_for_function("count => app.graph.nodes.length === count", arg=len(graph))
    page.evaluate(CENTER)
    page.wait_for_timeout(SETTLE * 1000)
    page.get_by_test_id("queue-button").first.click()
    times = noted(server.base)
    if bare:
        assert page.evaluate(f"{POINTS} === undefined"), "Our scripts were there."
    else:
        page.wait_for_function(f"{POINTS} === 'Loss of {steps} points up to step {steps}'")  # it was not idle
    page.close()
    return times


def with_listener(server: Any, name: str, steps: int) -> tuple[float, float]:
    stopped = threading.Event()
    listener = threading.Thread(target=lambda: asyncio.run(listen(server, prompt(name, steps), name, stopped)))
    listener.start()
    try:
        return noted(server.base)
    finally:
        stopped.set()
        listener.join()


async def listen(server: Any, graph: dict[str, Any], name: str, stopped: threading.Event) -> None:
    """Hear the events of a run and ask for its curve each second until it is done."""
    client = uuid.uuid4().hex
    url = f"{server.url.replace('http', 'ws')}/ws?clientId={client}"
    async with aiohttp.ClientSession(server.url) as session, session.ws_connect(url, max_msg_size=0) as socket:

        async def hear() -> None:
            async for _ in socket:
                pass

        hearing = asyncio.create_task(hear())
        await asyncio.to_thread(server.queue, graph, client)
        since = 0
        while not stopped.is_set():
            await asyncio.sleep(1)
            async with session.get("/tessera/runs", params={"name": name}) as answer:
                runs = (await answer.json())["runs"]
            if runs:
                async with session.get(f"/tessera/runs/{runs[0]['id']}", params={"since": str(since)}) as answer:
                    since = (await answer.json())["step"]
        hearing.cancel()


def without_page(server: Any, name: str, steps: int) -> tuple[float, float]:
    server.queue(prompt(name, steps))
    return noted(server.base)


def only_on_cores(first: bool) -> None:
    """Pin the processes that this one starts from here on to the first core, or to all others."""
    if hasattr(os, "sched_setaffinity") and len(cores := sorted(CORES)) > 1:
        os.sched_setaffinity(0, cores[:1] if first else cores[1:])


def measure(rounds: int, steps: int, new_renderer: bool, base: Path) -> list[dict[str, tuple[float, float]]]:
    """Return for each round, by turn, (median seconds of a step, CPU seconds of one)."""
    from playwright.sync_api import sync_playwright

    load_tiny_writers().write_models(base / "models")
    (base / "custom_nodes").mkdir()
    (base / "custom_nodes" / "step_times.py").write_text(CLOCK)
    settings = base / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True)
    frontend_settings = {"Comfy.TutorialCompleted": True, "Comfy.Workflow.Persist": False}
    settings.write_text(json.dumps(frontend_settings | {"Comfy.VueNodes.Enabled": new_renderer}))
    chromium = dev.find_chromium(sys.executable)
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    times_by_round = []
    only_on_cores(first=True)
    server = comfy_server.ComfyServer(base, dev.find_comfyui(), cpu=True, env={"OMP_NUM_THREADS": "1"})
    with server:
        only_on_cores(first=False)
        with sync_playwright() as session:
            context = session.chromium.launch_persistent_context(
                base / "profile", executable_path=chromium, args=options, viewport={"width": 1800, "height": 1000}
            )
            context.set_default_timeout(PATIENCE * 1000)
            without_page(server, "warm_up", steps)
            turns = {
                "page": lambda name: with_page(context, server, name, steps),
                "bare page": lambda name: with_page(context, server, name, steps, bare=True),
                "listener": lambda name: with_listener(server, name, steps),
                "none": lambda name: without_page(server, name, steps),
            }
            for number in range(rounds):
                order = list(turns)[number % len(turns) :] + list(turns)[: number % len(turns)]
                times_by_round.append({turn: turns[turn](f"{turn} {number}") for turn in order})
                print(
                    number + 1,
                    {turn: f"{seconds:.4f}" for turn, (seconds, _) in times_by_round[-1].items()},
                    file=sys.stderr,
                    flush=True,
                )
            context.close()
    return times_by_round


def spread(values: list[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--new-renderer", action="store_true", help="Nodes 2.0 in place of the canvas")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tessera-open-page-", ignore_cleanup_errors=True) as folder:
        rounds = measure(args.rounds, args.steps, args.new_renderer, Path(folder))
    command = " ".join(["python benchmarks open_page", *sys.argv[1:]])
    today, load = datetime.now(timezone.utc).date(), os.getloadavg()[2] if hasattr(os, "getloadavg") else math.nan
    print("# A step with the page open\n")
    print(
        f"Made by `{command}` on {today}: {processor()}, {os.cpu_count()} cores, {platform.system()}, Python "
        f"{platform.python_version()}. The load of the machine was {load:.1f} in the last quarter of an hour.\n"
    )
    print(__doc__.split("\n\n", 2)[2].strip())
    print(
        f"\nA tiny FLUX in fp32 on one thread, a picture of {SIDE} x {SIDE} pixels, {args.steps} steps a run, "
        f"{len(rounds)} rounds of four runs in turning order; {'Nodes 2.0' if args.new_renderer else 'the canvas'}. "
        "Each figure is the median of the rounds (least and greatest); a quotient is formed within a round.\n"
    )
    turns = ("page", "bare page", "listener")
    print(f"| of a run | {' | '.join([*turns, 'none'])} | {' | '.join(f'{turn} / none' for turn in turns)} |")
    print(f"|---|{'---:|' * (2 * len(turns) + 1)}")
    for index, name in enumerate(("median step, ms", "CPU of the server for a step, ms")):
        milliseconds = (spread([1000 * turn[turn_name][index] for turn in rounds], 1) for turn_name in (*turns, "none"))
        quotients = (
            spread([turn[turn_name][index] / turn["none"][index] for turn in rounds], 3) for turn_name in turns
        )
        print(f"| {name} | {' | '.join([*milliseconds, *quotients])} |")


if __name__ == "__main__":
    main()

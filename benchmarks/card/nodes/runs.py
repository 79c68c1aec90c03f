"""Graphs through ComfyUI's own executor: its start, its loaders and its memory management, as `run.py` starts them."""

import os
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from card.nodes import graphs
from card.page import FAILED, OK

ROOT = Path(__file__).resolve().parents[3]
# Parts of 255 by which pictures may differ on average. A picture of another seed differs by ten times as much.
SAME = 0.02
FOLDERS = ("custom_nodes", "input", "output", "temp", "user", "models")


def start(spec: dict[str, Any]) -> Callable[[dict[str, Any], Any], dict[str, Any]]:
    runs = Runs(spec)
    return lambda settings, figures: runs.run(settings)


class Runs:
    """A ComfyUI that runs one graph after another."""

    def __init__(self, spec: dict[str, Any]):
        self.backend, self.base = spec["backend"], Path(tempfile.mkdtemp())
        for folder in FOLDERS:
            (self.base / folder).mkdir()
        (self.base / "custom_nodes" / "tessera").symlink_to(ROOT, target_is_directory=True)
        load_headless()
        comfyui = Path(os.environ["COMFYUI_PATH"])
        sys.path.insert(0, str(comfyui))  # what starts ComfyUI puts this folder in the first place
        options = ["--base-directory", str(self.base), "--database-url", "sqlite:///:memory:"]
        options += ["--cpu", "--use-pytorch-cross-attention"] if spec["device"] == "cpu" else []
        options += [spec["option"]] if spec["option"] else []
        self.server = import_module("headless.comfyui").start_comfyui(comfyui, options)
        self.workflow = graphs.read(ROOT / "workflows")
        self.plain: list[Any] = []

    def run(self, settings: dict[str, Any]) -> dict[str, Any]:
        kind = settings["graph"]
        if kind == "try it":
            return self.train(settings)
        if kind == "swap with a LoRA":
            outputs = self.execute(graphs.swap_with_lora(self.workflow, settings["steps"], [graphs.swap_node()]))
            return self.compare(self.pictures(outputs, "changed"), self.pictures(outputs, "plain"), outputs)
        chain = [graphs.swap_node(**settings["swapped"])] if "swapped" in settings else []
        if "compiled" in settings:
            chain.append(graphs.compile_node(backend=self.backend, **settings["compiled"]))
        if not self.plain:
            self.plain = self.pictures(self.execute(graphs.sampling(self.workflow, [], "plain")), "plain")
        if not chain:
            first, second = self.plain
            apart = difference(first, second)
            return {"state": OK if apart > SAME else FAILED, "text": f"two seeds differ by {apart:.3f}; {vram()}"}
        outputs = self.execute(graphs.sampling(self.workflow, chain, "changed"))
        return self.compare(self.pictures(outputs, "changed"), self.plain, outputs)

    def execute(self, graph: graphs.Graph) -> dict[str, Any]:
        """Run a graph and return the outputs of its nodes by number. Raises RuntimeError if a node fails."""
        execution, rank, reports = (import_module(f"headless.{name}") for name in ("execution", "rank", "reports"))
        run = execution.Run(graph, {}, set(), reports.Reporter(None), rank.Rank(), reports.Result(None))
        self.server.loop.run_until_complete(run.execute_on(self.server))
        history = self.server.prompt_queue.get_history(run.id)[run.id]
        if history["status"]["status_str"] != "success":
            failed = dict(history["status"]["messages"]).get("execution_error", {})
            raise RuntimeError(f"{failed.get('node_type')}: {str(failed.get('exception_message')).strip()}")
        return history["outputs"]

    def pictures(self, outputs: dict[str, Any], name: str) -> list[Any]:
        images = [outputs[f"{name} {number} saver"]["images"][0] for number in range(len(graphs.SEEDS))]
        files = [self.base / image["type"] / image["subfolder"] / image["filename"] for image in images]
        return [np.asarray(Image.open(file).convert("RGB"), dtype=np.float32) for file in files]

    def compare(self, changed: list[Any], plain: list[Any], outputs: dict[str, Any]) -> dict[str, Any]:
        far = max(difference(a, b) for a, b in zip(changed, plain, strict=True))
        report, compiled = graphs.read_report(outputs)
        text = "; ".join(filter(None, [f"pictures differ by {far:.4f}", vram(), report]))
        return {"state": OK if far <= SAME and compiled else FAILED, "text": text, "figures": {"differs": far}}

    def train(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Train as the shared workflow does; the loss has to fall if there are at least 50 steps."""
        outputs = self.execute(graphs.training(self.workflow, settings["steps"], settings["compile"]))
        (summary,) = (
            outputs_of_node["tessera"][0]
            for outputs_of_node in outputs.values()
            if "loss" in (outputs_of_node.get("tessera") or [{}])[0]
        )
        loss = summary["loss"]
        part = max(1, len(loss) // 5)
        first, last = (sum(losses) / len(losses) for losses in (loss[:part], loss[-part:]))
        good = len(loss) == settings["steps"] and (last < first or len(loss) < 50)
        text = f"{len(loss)} steps, loss {first:.3f} to {last:.3f}; {vram()}; {'; '.join(summary.get('notes', [])[:2])}"
        return {"state": OK if good else FAILED, "text": text}


def load_headless() -> None:
    """The package of run.py, without the pack's own folder on the path: ComfyUI has modules of the same names as the
    pack. Torch is not loaded by it, which ComfyUI sets the environment for first."""
    spec = spec_from_file_location("headless", ROOT / "headless" / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["headless"] = module_from_spec(spec)
    spec.loader.exec_module(module)


def difference(a: Any, b: Any) -> float:
    return float(np.abs(a - b).mean() / 255)


def vram() -> str:
    enabled = getattr(import_module("comfy.memory_management"), "aimdo_enabled", False)
    return f"dynamic VRAM is {'on' if enabled else 'off'}"

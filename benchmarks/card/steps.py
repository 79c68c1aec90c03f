"""Training steps of a real model: seconds by phase, memory, and the kernels of one profiled step.

The model is made once, with random weights; each case is a new Trainer on it. Phases of a step: host, until all of it
is queued; wait, until the device has finished; rest, the optimizer and the work before the next step.
"""

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from comfyui import DTYPES, set_up_comfyui

from card.page import FAILED, OK

WARM_UP, STEPS = 2, 6
GIB, GB = 2**30, 1e9


def start(spec: dict[str, Any]) -> Callable[[dict[str, Any], Any], dict[str, Any]]:
    from card.rates import Rates

    set_up_comfyui(spec["device"])
    if spec["device"] == "cuda":  # as ComfyUI has it done when it loads the pack
        import_module("tessera.models.layers.attention").settle_kernel_order()
    rates, steps = Rates(torch.device(spec["device"])), Steps(spec)
    return lambda settings, figures: rates.measure(settings) if "what" in settings else steps.measure(settings, figures)


class Enough(Exception):
    """Ends a run after the steps that were asked for."""


class Steps:
    def __init__(self, spec: dict[str, Any]):
        from families import MODELS

        from card.kernels import count_bytes
        from step.turns import Memory

        self.spec, self.cuda = spec, spec["device"] == "cuda"
        self.model = MODELS[spec["size"]][spec["model"]]
        free = torch.cuda.mem_get_info()[0] if self.cuda else 0
        self.patcher = load(spec, self.model)
        self.memory = Memory(spec["device"], free)
        count_bytes()

    def measure(self, settings: dict[str, Any], figures_by_case: dict[str, Any]) -> dict[str, Any]:
        from card.kernels import bytes_of_graphs
        from step.data import random_data

        picture = self.model.picture
        if settings["side"] and self.spec["size"] == "full":
            picture = replace(picture, width=settings["side"], height=settings["side"])
        elif not self.cuda:  # which only tries the command
            picture = replace(picture, width=64, height=64, length=16, frames=min(picture.frames, 5))
        data, count = random_data(self.patcher, picture, 2), settings.get("steps", STEPS if self.cuda else 1)
        if self.cuda:
            torch.cuda.empty_cache()
        self.memory.start()
        in_graphs, began = bytes_of_graphs(), time.perf_counter()
        trainer = self.make_trainer(settings, data)
        try:
            placed = time.perf_counter() - began
            steps_of(trainer, WARM_UP, self.cuda)
            ring = trainer.placed.weights.swap.ring if trainer.placed.weights.swap else None
            if ring is not None and ring.locking is not None:
                ring.locking.wait()
            ready = time.perf_counter() - began
            copied = ring.bytes_copied if ring else 0
            parts = steps_of(trainer, count, self.cuda)
            copied = (ring.bytes_copied - copied) / count if ring else 0
            facts, memory = trainer.summary(), self.memory.figures()
            profiled = self.profile(trainer) if settings.get("profiled") else {}
        finally:
            trainer.close()
            gc.collect()
        parts = {name: median(part[name] for part in parts) for name in parts[0]}
        figures = {
            **parts,
            **memory,
            "copied": copied,
            "placing": placed,
            "ready": ready,
            **_plain(facts),
            **profiled.get("found", {}),
        }
        if profiled:
            figures["bytes_of_graphs"] = bytes_of_graphs() - in_graphs
        good = not settings["compiled"] or (
            facts["graphs_compiled"] == facts["graphs_planned"] and not facts["graph_breaks"]
        )
        return {
            "state": OK if good else FAILED,
            "text": self.text(figures),
            "figures": figures,
            "row": self.row(figures, figures_by_case),
            "details": profiled.get("table", ""),
        }

    def make_trainer(self, settings: dict[str, Any], data: Any) -> Any:
        from step.contestant import make_trainer

        names = ("attention", "pin_memory", "offload_activations", "low_bit_matmul", "quantize")
        memory = {name: settings[name] for name in names if name in settings}
        if "budget" in settings:
            memory["activation_budget"] = settings["budget"]
        spec = {**settings, "memory": memory, "backend": self.spec["backend"]}
        return make_trainer(spec, self.patcher, data, Path(tempfile.mkdtemp()))

    def profile(self, trainer: Any) -> dict[str, Any]:
        from card.kernels import summarise

        kinds = torch.profiler.ProfilerActivity
        profile = torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if self.cuda else [])])
        steps_of(trainer, 2, self.cuda, profile)
        return summarise(profile)

    def text(self, figures: dict[str, Any]) -> str:
        seconds = ", ".join(f"{name} {figures[name]:.3f}" for name in ("host", "wait", "rest"))
        peak = f"{figures['driver_mib'] / 1024:.1f} GiB by the driver" if self.cuda else "a CPU"
        low = f", {figures['8-bit products']} products in 8 bits" if "8-bit products" in figures else ""
        compiling = f"compiled in {figures['compile_seconds'] or 0:.0f} s"
        return f"{figures['all']:.3f} s a step ({seconds}), {peak}, {compiling}{low}"

    def row(self, figures: dict[str, Any], figures_by_case: dict[str, Any]) -> dict[str, str]:
        """The line of the page's table. The least time is that of the copies by the link."""
        cells = {"s a step": f"{figures['all']:.3f}", **{n: f"{figures[n]:.3f}" for n in ("host", "wait", "rest")}}
        cells["device"] = f"{figures['device']:.3f}" if figures.get("device") else ""
        cells["by the driver, GiB"] = f"{figures['driver_mib'] / 1024:.1f}" if self.cuda else ""
        cells["by torch, GiB"] = f"{(figures['peak_mib'] + figures['baseline_mib']) / 1024:.1f}" if self.cuda else ""
        cells |= {"graphs": str(figures["graphs_compiled"]), "compiling, s": f"{figures['compile_seconds'] or 0:.0f}"}
        cells["blocks swapped"] = str(figures.get("blocks_swapped") or "")
        cells["ready, s"] = f"{figures['ready']:.0f}" if figures.get("blocks_swapped") else ""
        cells["GB copied"] = f"{figures['copied'] / GB:.2f}" if figures["copied"] else ""
        link = figures_by_case.get("rates: link", {}).get("link")
        cells["s at the link's rate"] = f"{figures['copied'] / link:.3f}" if link and figures["copied"] else ""
        return cells


def load(spec: dict[str, Any], model: Any) -> Any:
    """The MODEL on the host, as a loader leaves it."""
    file = ""
    if model.write is not None:
        file = str(model.write(Path(tempfile.mkdtemp()) / "model.safetensors"))
    with torch.inference_mode():
        if spec.get("stored") == "fp8":
            return model.load(file, spec["device"], torch.float8_e4m3fn, on_host=True)
        return model.load(file, spec["device"], DTYPES["bf16" if spec["device"] == "cuda" else "fp32"], on_host=True)


def steps_of(trainer: Any, count: int, cuda: bool, profile: Any = None) -> list[dict[str, float]]:
    """Take `count` steps; returns the seconds of each in parts. profile: a profiler that is around the last one."""
    parts: list[dict[str, float]] = []
    began = [time.perf_counter()]
    finite, call_watchers = trainer.train_step.finite, trainer.call_watchers
    save = trainer.saver.save_unsaved_progress

    def timed(total: torch.Tensor) -> float:
        queued = time.perf_counter()
        loss = finite(total)
        parts.append({"host": queued - began[0], "wait": time.perf_counter() - queued, "loss": loss})
        return loss

    def after_a_step(requests: Any) -> None:
        call_watchers(requests)
        if parts:
            parts[-1]["all"] = time.perf_counter() - began[0]
            parts[-1]["rest"] = parts[-1]["all"] - parts[-1]["host"] - parts[-1]["wait"]
            if profile is not None and len(parts) == count - 1:
                _wait(cuda)
                profile.start()
        if len(parts) == count:
            raise Enough
        began[0] = time.perf_counter()

    trainer.train_step.finite, trainer.call_watchers = timed, after_a_step
    trainer.saver.save_unsaved_progress = lambda: None
    try:
        trainer.run()
    except Enough:
        pass
    finally:
        trainer.train_step.finite, trainer.call_watchers = finite, call_watchers
        trainer.saver.save_unsaved_progress = save
    _wait(cuda)
    if profile is not None:
        profile.stop()
    return parts


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Value as JSON holds it."""
    return {name: value for name, value in facts.items() if isinstance(value, str | int | float | None)}

"""Wait between commands, and report time and memory of the steps since the last command."""

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures import MIB, copies_to_device, peak_and_rest
from torch.optim.optimizer import register_optimizer_step_post_hook


class Memory:
    """Memory of this process in bytes, beyond that at the creation of this object.

    free: free memory by the driver before anything was loaded.
    """

    def __init__(self, device: str, free: int):
        self.cuda, self.free = device == "cuda", free
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        self.resident = _status("VmRSS")
        self.allocated = torch.cuda.memory_allocated() if self.cuda else 0
        self.reserved = torch.cuda.memory_reserved() if self.cuda else 0

    def start(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        elif Path("/proc/self/clear_refs").exists():
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the greatest resident size

    def figures(self) -> dict[str, float]:
        if not self.cuda:
            return {"peak_mib": (_status("VmHWM") - self.resident) / MIB, "baseline_mib": self.resident / MIB}
        return {
            "peak_mib": (torch.cuda.max_memory_reserved() - self.reserved) / MIB,
            "baseline_mib": self.reserved / MIB,
            "allocated_mib": (torch.cuda.max_memory_allocated() - self.allocated) / MIB,
            "driver_mib": (self.free - torch.cuda.mem_get_info()[0]) / MIB,
        }


def _status(field: str) -> int:
    """A figure of /proc/self/status in bytes; without one (not Linux) the greatest resident size so far."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import psutil

        memory = psutil.Process().memory_info()
        return getattr(memory, "peak_wset", memory.rss)
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


class Turns:
    """Lets the training go on for as many steps as the parent says, and times them."""

    def __init__(self, memory: Memory, reply: Callable[[dict[str, Any]], None]):
        self.memory, self.reply = memory, reply
        self.facts: Callable[[], dict[str, Any]] = dict
        self.held_figures: Callable[[], dict[str, Any]] | None = None
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.profiler: torch.profiler.profile | None = None
        self.steps_left = 0
        self.started = self.cpu_started = 0.0
        register_optimizer_step_post_hook(self.after_step)

    def after_step(self, *_: Any) -> None:
        if self.memory.cuda:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.started)
        self.cpu_seconds.append(time.process_time() - self.cpu_started)
        self.steps_left -= 1
        if self.steps_left == 0:
            self.answer()
            self.wait()
        self.start_clocks()

    def start_clocks(self) -> None:
        self.started, self.cpu_started = time.perf_counter(), time.process_time()

    def answer(self) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            self.reply(profiled(self.profiler, self.memory.cuda))
            self.profiler = None
        else:
            times = {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
            self.reply({**times, **self.memory.figures(), **self.facts()})

    def wait(self) -> None:
        """Return when there are steps to take; end the process when the parent has no more commands."""
        while line := sys.stdin.readline():
            command = json.loads(line)
            if command["do"] == "held":
                assert self.held_figures is not None
                self.reply(self.held_figures())
                continue
            self.seconds = []
            self.cpu_seconds = []
            self.steps_left = command.get("count", 1)
            gc.collect()
            self.memory.start()
            if command["do"] in ("memory", "copies"):
                self.profiler = memory_profiler() if command["do"] == "memory" else copy_profiler()
                self.profiler.start()
            self.start_clocks()
            return
        raise SystemExit


def memory_profiler() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def copy_profiler() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])


def profiled(profiler: torch.profiler.profile, cuda: bool) -> dict[str, float]:
    """Return figures of one step: on a CPU its peak allocation, on a GPU bytes and seconds of the copies to it."""
    if not cuda:
        return {"step_peak_mib": peak_and_rest(allocations(profiler))[0] / MIB}
    copied, seconds = copies_to_device(events_of(profiler))
    return {"copied_bytes": copied, "copying_seconds": seconds}


def events_of(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]


def allocations(profiler: torch.profiler.profile) -> list[tuple[float, int]]:
    """(time, bytes) of every allocation and release that torch's CPU allocator made under the profiler."""
    return [(e["ts"], e["args"]["Bytes"]) for e in events_of(profiler) if e["name"] == "[memory]"]

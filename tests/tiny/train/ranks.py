"""Processes that train together on this machine, over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

# 12 samples a step, which 2, 3 and 4 ranks can share.
STEP = {"steps": 4, "batch_size": 4, "gradient_accumulation": 3, "save_every": 0}
# Adam enlarges the last bits of gradients that are all but zero, unless eps is of their size.
STEP |= {"optimizer": {"eps": 1e-4}}

PROCESS = Path(__file__).with_name("rank_process.py")


class Ranks:
    """Processes that are started when they are first needed, and again after one was killed."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.number = 0
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: list[Any] = []
        self.starting: list[Any] = []  # that have not said yet that they are ready

    def start(self, size: int) -> None:
        self.begin(size)
        while self.starting:
            assert self.starting.pop().stdout.readline() == "ready\n"

    def begin(self, size: int) -> None:
        """Start the missing ones of this many processes, which takes seconds, without waiting."""
        self.processes = [process for process in self.processes if process.poll() is None]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        while len(self.processes) < size:
            log = open(self.folder / f"rank {self.number} {len(self.processes)}.log", "w")  # noqa: SIM115
            command = [sys.executable, str(PROCESS), str(self.store.port)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            self.processes.append(subprocess.Popen(command, env=environment, text=True, **pipes))
            self.starting.append(self.processes[-1])

    def train(self, size: int, root: Path, settings: dict[str, Any] | None = None, **job: Any) -> list[dict[str, Any]]:
        """Train on `size` ranks. Return the answer of each, an empty dict for one that was killed, or that hangs and is
        killed."""
        self.start(size)
        self.number += 1
        job = {"model": str(self.model)} | job | {"number": self.number, "size": size, "root": str(root)}
        job |= {"settings": settings or {}, "out": str(self.folder / f"lora {self.number}")}
        used = self.processes[:size]
        for rank, process in enumerate(used):
            process.stdin.write(json.dumps(job | {"rank": rank}) + "\n")
            process.stdin.flush()
        act = job.get("act") or {}
        hangs = act["rank"] if act.get("do") == "hang" else None
        answers = {rank: process.stdout.readline() for rank, process in enumerate(used) if rank != hangs}
        if hangs is not None:
            used[hangs].kill()
            answers[hangs] = ""
        for rank, process in enumerate(used):
            if not answers[rank] or job.get("ends"):
                process.wait()
        self.begin(size)
        return [json.loads(answers[rank]) if answers[rank] else {} for rank in range(size)]

    def lora(self, rank: int = 0) -> dict[str, torch.Tensor]:
        """The LoRA that a rank gave back last."""
        return load_file(f"{self.folder / f'lora {self.number}'}.{rank}")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], part: float = 1e-5) -> None:
    """Check equality to a fraction of each tensor's norm."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name] - tensor).norm() <= part * tensor.norm(), (name, (actual[name] - tensor).norm())


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Check bitwise equality."""
    assert first.keys() == second.keys() and not [n for n in first if not torch.equal(first[n], second[n])]


def errors_of(answers: list[dict[str, Any]]) -> list[str]:
    return [answer.get("error", "") for answer in answers]

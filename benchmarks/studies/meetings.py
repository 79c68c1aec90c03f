"""Measure the barrier by the store that comes before each sum of the gradients, for 2 to 64 processes of this machine.

    python benchmarks meetings [--write]

The processes do nothing else, and load no model. --write writes benchmarks/results/meetings.json, which
benchmarks/studies/many_cards.py puts on its page.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comfyui import ROOT, load
from processes import processor

RESULTS = Path(__file__).parents[1] / "results" / "meetings.json"
RANKS = (2, 4, 8, 16, 32, 64)
MEETINGS, PERIOD = 20, 0.5  # of each measurement; seconds from one to the next
SPREADS = (0.0, 0.1)  # seconds over which the ranks come, the last one at their end
barrier = load("barrier", ROOT / "train" / "distributed" / "barrier.py")


class Counted:
    """Store that counts the requests to it."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self.store, name)


def take_part(port: int, rank: int, ranks: int, spread: float, start: Any, answers: Any) -> None:
    """Pass barriers again and again, as `Collectives.all_reduce` does; answers with (came, left, requests) of each."""
    store = Counted(dist.TCPStore("127.0.0.1", port, is_master=False))
    sampled = random.Random(rank)
    first_start = start(store)
    timings = []
    for number in range(MEETINGS + 1):
        early = sampled.random() * spread if rank else 0.0
        time.sleep(max(0.0, first_start + (number + 1) * PERIOD - early - time.monotonic()))
        came, store.requests = time.monotonic(), 0
        store.set(f"at/{rank}", str(number))
        current = barrier.Barrier(store, f"sum {number}", range(ranks), rank)
        current.wait(None, 60.0, lambda: False, None)
        if rank == 0 and number:
            barrier.Barrier(store, f"sum {number - 1}", range(ranks), rank).delete()
        timings.append((came, time.monotonic(), store.requests))
    answers.put(timings[1:])  # without the first


def serve(port: Any, ended: Any) -> None:
    """Hold the store, as torchrun's agent does: in a process of its own, since one with threads can't be forked."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.put(server.port)
    ended.wait()


def measured(ranks: int, spread: float) -> dict[str, Any]:
    """Measure meetings of this many processes. Returns seconds from when the last came to when the last left."""
    context = multiprocessing.get_context("fork")  # they share the pages of torch
    port, ended = context.SimpleQueue(), context.Event()
    server = context.Process(target=serve, args=(port, ended), daemon=True)
    server.start()
    port_number = port.get()
    together = context.Barrier(ranks + 1)
    begin = context.Value("d", 0.0)
    answers = context.SimpleQueue()

    def start(_: Any) -> float:
        together.wait()
        together.wait()
        return float(begin.value)

    arguments = [(port_number, rank, ranks, spread, start, answers) for rank in range(ranks)]
    processes = [context.Process(target=take_part, args=args, daemon=True) for args in arguments]
    for process in processes:
        process.start()
    together.wait()
    begin.value = time.monotonic()
    together.wait()
    timings_by_rank = [answers.get() for _ in processes]
    ended.set()
    for process in (*processes, server):
        process.join()
    seconds, requests = [], []
    for timings in zip(*timings_by_rank, strict=True):
        seconds.append(max(end for _, end, _ in timings) - max(came for came, _, _ in timings))
        requests.append(sum(count for _, _, count in timings))
    median, worst = statistics.median(seconds), max(seconds)
    return {"ranks": ranks, "spread": spread, "median": median, "worst": worst, "requests": statistics.median(requests)}


def rows() -> Iterator[dict[str, Any]]:
    for spread in SPREADS:
        for ranks in RANKS:
            row = measured(ranks, spread)
            yield {name: round(value, 5) for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    busy = os.getloadavg()[0]  # load of other programs
    results = {"processor": processor(), "cores": os.cpu_count(), "load": round(busy, 1), "torch": torch.__version__}
    results |= {"meetings": MEETINGS, "rows": list(rows())}
    text = json.dumps(results, indent=1)
    if args.write:
        RESULTS.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

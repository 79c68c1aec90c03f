"""Feeds hostile inputs to everything that reads a stranger's texts and files, and prints what breaks a bound.

Run: python dev.py fuzz --seconds 60 --seed 0
The readers get their inputs in this process, then a real ComfyUI gets some over HTTP. An input breaks a bound if it
takes more CPU or memory than `watch` says, or ends in an error that is no sentence for users; the smallest such input
is searched for and printed. Ends with status 1 if there was one.
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import watch  # noqa: E402
import with_comfyui  # noqa: E402
from readers import READERS, Reader  # noqa: E402
from search import Fault, search  # noqa: E402
from served import Served  # noqa: E402

ROUND = 60  # inputs of one reader at a time
SERVED_ROUND = 4


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="how long to look, after ComfyUI has started")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same inputs in the same order")
    parser.add_argument("--served", type=float, default=0.4, help="share of the time for ComfyUI's own server, 0 to 1")
    parser.add_argument("--only", default="", help="readers whose name has this text in it")
    return parser.parse_args(arguments)


def fuzz(readers: Sequence[Reader], seconds: float, seed: int, size: int, folder: Path) -> tuple[int, list[Fault]]:
    """Give each reader inputs in turn until the time is over, or all have failed; each reader gets one round at least.

    size: inputs of a round. folder: for the input in hand. Returns (inputs given, faults, one a reader).
    """
    end = time.monotonic() + seconds
    count, faults = 0, list[Fault]()
    remaining = list(readers)
    for number in itertools.count():
        for reader in tuple(remaining):
            if number and time.monotonic() > end:
                return count, faults
            input_count, fault = search(reader, f"{seed} {number}", size, folder)
            count += input_count
            if fault is not None:
                remaining.remove(reader)
                faults.append(fault)
        if not remaining:
            return count, faults
    raise AssertionError


def main(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    watch.show_hangs()
    print(f"The input in hand is kept in {tempfile.gettempdir()}/tessera-fuzz-*, should one never end.", flush=True)
    readers = [reader for reader in READERS if args.only in reader.name]
    with tempfile.TemporaryDirectory(prefix="tessera-fuzz-") as scratch:
        folder = Path(scratch)
        in_process = args.seconds * (1 - args.served)
        count, faults = fuzz(readers, in_process, args.seed, ROUND, folder) if readers else (0, [])
        print(f"{count:,} inputs to {len(readers)} readers: {len(faults)} faults.", flush=True)
        for fault in faults:
            print(f"\n{fault}", flush=True)
        with with_comfyui.make_server(folder / "comfyui") as server:
            served = Served(server)
            routes = [reader for reader in served.readers() if args.only in reader.name]
            seconds = args.seconds * args.served
            input_count, server_faults = fuzz(routes, seconds, args.seed, SERVED_ROUND, folder) if routes else (0, [])
            print(f"{input_count:,} inputs to a server: {len(server_faults)} faults; {served.summary()}", flush=True)
    for fault in server_faults:
        print(f"\n{fault}", flush=True)
    return 1 if faults or server_faults else 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    with_comfyui.pytest_unconfigure()
    sys.exit(status)

"""The command `dev.py card`: arguments, one process after another, and what is written after every case.

Nothing but the standard library: torch is loaded by the processes that do the work (`worker.py`), so that one which
hangs, is killed or runs out of memory takes no other with it.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from processes import Told

from card.cases import PARTS, Case, Group, groups
from card.page import CUT, FAILED, SKIPPED, Report

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cards"
WORKER = "card/worker.py"  # beside processes.py
STARTING = 150.0  # seconds until a process has loaded torch, ComfyUI and its model
STOPPED = 128 + signal.SIGTERM


def parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dev.py card",
        description="Checks and times training and sampling on this machine's GPU, and writes a page to paste into an "
        "issue. Each part takes under eight minutes; what is done is on the page when it is stopped.",
    )
    parser.add_argument("--part", nargs="+", default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the command")
    parser.add_argument("--size", choices=("full", "tiny"), help="of the models; full on a GPU")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="cases with one of these in their names")
    parser.add_argument("--limit", type=float, default=450.0, metavar="SECONDS", help="for each part; 450")
    parser.add_argument("--comfyui", metavar="FOLDER", help="a ComfyUI to run with, by the Python that runs this")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="for page, figures and log")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    args = parser.parse_args(given)
    if unknown := [part for part in args.part if part not in PARTS]:
        parser.error(f"--part is {unknown[0]}; take one of {', '.join(PARTS)}.")
    args.part = list(dict.fromkeys(args.part))
    args.size = args.size or ("full" if args.device == "cuda" else "tiny")
    if args.device == "cpu" and args.size == "full":
        parser.error("--size is full, which takes a GPU; with --device cpu take tiny.")
    if args.limit < 1:
        parser.error(f"--limit is {args.limit:g}; take at least a second.")
    return args


def run(args: argparse.Namespace, python: str, comfyui: Path) -> int:
    """Run the parts; returns 1 where a case failed."""
    with tempfile.TemporaryDirectory(prefix="tessera-card-") as scratch, stopped_by_a_signal():
        environment = environment_of(comfyui, Path(scratch))
        machine = facts(args, python, environment, Path(scratch))
        say(f"{machine['card']}, torch {machine['torch']}, ComfyUI {machine['comfyui']}")
        failed = 0
        for part in args.part:
            base = args.out / f"{slug(machine['card'])}_{date.today()}_{part}"
            report = Report(base, part, machine, command_of(args, part))
            failed += run_part(args, report, groups(part, args.device, args.size, machine), python, environment)
        return 1 if failed else 0


def run_part(
    args: argparse.Namespace, report: Report, made: Sequence[Group], python: str, environment: dict[str, str]
) -> int:
    """Run the cases of one part; returns how many failed."""
    until = time.monotonic() + args.limit
    asked = args.only or [""]
    chosen = [replace(g, cases=tuple(c for c in g.cases if any(text in c.name for text in asked))) for g in made]
    report.planned = sum(len(group.cases) for group in chosen)
    say(f"\n{report.part}: {report.planned} cases, {args.limit:.0f} s at most")
    for group in chosen:
        spec = {"device": args.device, "size": args.size, "backend": args.backend, **group.spec}
        told = Told(report.part, spec, script=WORKER, python=python, log=report.log)
        told.environment = environment | group.environment
        own = min(until, time.monotonic() + group.share * args.limit)
        starts = True
        try:
            for case in group.cases:
                started = time.monotonic()
                if starts:
                    result = attempt(told, case, own, report.figures())
                    starts = not result.pop("unstarted", False)
                else:
                    result = {"state": SKIPPED, "text": "its process does not start"}
                report.add(case.name, time.monotonic() - started, result)
                say(report.lines[-1])
        finally:
            end(told)
    report.finish()
    say(f"{report.summary()}\nPage: {report.page_file}")
    return report.count(FAILED)


def attempt(told: Told, case: Case, until: float, before: dict[str, Any]) -> dict[str, Any]:
    """Run one case in the process of its group, which is started where there is none."""
    if case.missing:
        return {"state": SKIPPED, "text": case.missing}
    left = until - time.monotonic()
    if left < case.least:
        return {"state": SKIPPED, "text": f"{max(left, 0.0):.0f} s are left, it takes about {case.least:.0f}"}
    cut = left < STARTING
    if told.process is None:
        told.ended, told.limit = "", min(STARTING, left)
        told.launch()
        left = until - time.monotonic()
    unstarted = bool(told.ended)
    reply: dict[str, Any] = {}
    if not unstarted:
        cut = left < case.limit
        told.limit = max(1.0, min(case.limit, left))
        reply = told.ask(name=case.name, how=case.how, before=before)
    if told.ended:
        reply = {"state": CUT if cut and told.ended.startswith("no reply") else FAILED, "text": told.ended}
        reply["unstarted"] = unstarted
    if told.ended or reply.pop("spoiled", False):
        end(told)
    return reply


def end(told: Told) -> None:
    """End the process without waiting: its work is done, or it hangs."""
    if told.process is not None:
        told.process.kill()
        told.stop()


def facts(args: argparse.Namespace, python: str, environment: dict[str, str], scratch: Path) -> dict[str, Any]:
    """Ask a process what the machine is. Ends the command where it has no such device."""
    spec = {"kind": "facts", "device": args.device}
    told = Told("facts", spec, script=WORKER, python=python, log=scratch / "facts.log", limit=STARTING)
    told.environment = environment
    try:
        found = told.launch()
    finally:
        end(told)
    if told.ended:
        raise SystemExit(f"{python} can't be used: {told.ended}")
    if not found["card"]:
        raise SystemExit(
            f"torch {found['torch']} finds no CUDA device here; with --device cpu the command is tried at tiny sizes."
        )
    return found | {"driver": driver_version(), "commit": commit()}


def environment_of(comfyui: Path, scratch: Path) -> dict[str, str]:
    """Compiled code goes to an empty folder: what compiling takes is that of a first run."""
    return os.environ | {
        "COMFYUI_PATH": str(comfyui),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TMPDIR": str(scratch),
        "TEMP": str(scratch),
        "PYTHONUNBUFFERED": "1",
    }


def command_of(args: argparse.Namespace, part: str) -> str:
    parts = ["python dev.py card --part", part]
    if args.device != "cuda":
        parts += ["--device", args.device, "--size", args.size]
    if args.backend != "inductor":
        parts += ["--backend", args.backend]
    return shlex.join([*" ".join(parts).split(), *(["--only", *args.only] if args.only else [])])


def slug(name: str) -> str:
    """The card's name as a file's."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def driver_version() -> str:
    if not (found := shutil.which("nvidia-smi")):
        return ""
    query = [found, "--query-gpu=driver_version", "--format=csv,noheader"]
    return (subprocess.run(query, capture_output=True, text=True).stdout.splitlines() or [""])[0].strip()


def commit() -> str:
    """The commit of the checkout, where it is one."""
    if not (found := shutil.which("git")) or not (ROOT / ".git").exists():
        return ""
    asked = [found, "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip()


@contextmanager
def stopped_by_a_signal() -> Iterator[None]:
    """Let SIGTERM, as `timeout` sends it, end this as an exception does: with its process, and the page as it is."""

    def stop(*_: Any) -> None:
        raise SystemExit(STOPPED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def say(text: str) -> None:
    print(text, flush=True)

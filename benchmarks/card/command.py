"""The command `dev.py card`: arguments, a process for each model, and what is written after every case.

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

from card.case import Case, Group
from card.cases import PARTS, groups
from card.page import CUT, FAILED, SKIPPED, Report
from card.plan import plan

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cards"
WORKER = "card/worker.py"  # beside processes.py
STARTING = 150.0  # seconds until a process has loaded torch, ComfyUI and its model
PLAN = "plan"  # in place of a part
MINUTES, LIMIT = 12.0, 450.0  # of the plan, and seconds of a part
STOPPED = 128 + signal.SIGTERM


def parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dev.py card",
        description="Checks and times training and sampling on this machine's GPU, and writes a page to paste into an "
        f"issue. Without --part it takes {MINUTES:.0f} minutes, what matters most first; what is done is on the page "
        "when it is stopped.",
    )
    parser.add_argument("--minutes", type=float, help=f"for everything, by worth; {MINUTES:.0f}")
    parser.add_argument("--part", nargs="+", metavar="PART", help=f"whole, one after another: {', '.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the command")
    parser.add_argument("--size", choices=("full", "tiny"), help="of the models; full on a GPU")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="cases with one of these in their names")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=f"for each part; {LIMIT:.0f}")
    parser.add_argument("--comfyui", metavar="FOLDER", help="a ComfyUI to run with, by the Python that runs this")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="for page, figures and log")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    args = parser.parse_args(given)
    if args.part and args.minutes is not None:
        parser.error("--minutes is for all parts together; leave out --part, or give --limit for each part.")
    if not args.part and args.limit is not None:
        parser.error("--limit is for each --part; give --minutes for all together.")
    if unknown := [part for part in args.part or () if part not in PARTS]:
        parser.error(f"--part is {unknown[0]}; take one of {', '.join(PARTS)}.")
    args.part = list(dict.fromkeys(args.part or ()))
    args.minutes = MINUTES if args.minutes is None else args.minutes
    args.limit = LIMIT if args.limit is None else args.limit
    args.size = args.size or ("full" if args.device == "cuda" else "tiny")
    if args.device == "cpu" and args.size == "full":
        parser.error("--size is full, which takes a GPU; with --device cpu take tiny.")
    if args.limit < 1:
        parser.error(f"--limit is {args.limit:g}; take at least a second.")
    if not 0 < args.minutes < 24 * 60:
        parser.error(f"--minutes is {args.minutes:g}; take more than 0 and less than a day.")
    return args


def run(args: argparse.Namespace, python: str, comfyui: Path) -> int:
    """Run the plan, or the parts that are named; returns 1 where a case failed."""
    with tempfile.TemporaryDirectory(prefix="tessera-card-") as scratch, stopped_by_a_signal():
        began = time.monotonic()
        environment = environment_of(comfyui, Path(scratch))
        machine = facts(args, python, environment, Path(scratch))
        say(f"{machine['card']}, torch {machine['torch']}, ComfyUI {machine['comfyui']}")
        failed = 0
        for part in args.part or [PLAN]:
            base = args.out / f"{slug(machine['card'])}_{date.today()}_{part}"
            report = Report(base, part, machine, command_of(args, part))
            if part == PLAN:
                made, until = plan(args.device, args.size, machine), began + 60 * args.minutes
            else:
                made, until = groups(part, args.device, args.size, machine), time.monotonic() + args.limit
            failed += run_groups(args, report, made, until, python, environment)
        return 1 if failed else 0


def run_groups(
    args: argparse.Namespace,
    report: Report,
    made: Sequence[Group],
    until: float,
    python: str,
    environment: dict[str, str],
) -> int:
    """Run the cases of these groups until that time; returns how many failed.

    Groups of one process share it, and it waits where others come between. While nothing is timed, the process of the
    next group starts.
    """
    asked = args.only or [""]
    chosen = [replace(g, cases=tuple(c for c in g.cases if any(text in c.name for text in asked))) for g in made]
    chosen = [group for group in chosen if group.cases]
    report.planned = sum(len(group.cases) for group in chosen)
    limit = until - time.monotonic()
    say(f"\n{report.part}: {report.planned} cases, {max(limit, 0):.0f} s at most")
    processes = Processes(report, args, python, environment)
    try:
        for number, group in enumerate(chosen):
            told = processes.of(group)
            own = min(until, time.monotonic() + group.share * limit)
            if not group.timed and number + 1 < len(chosen):
                processes.begin(chosen[number + 1], until)
            run_group(told, group, own, report)
            processes.end_unneeded(chosen[number + 1 :])
    finally:
        processes.end_unneeded([])
    report.finish()
    say(f"{report.summary()}\nPage: {report.page_file}")
    return report.count(FAILED)


def run_group(told: Told, group: Group, until: float, report: Report) -> None:
    starts = True
    for case in group.cases:
        started = time.monotonic()
        if starts:
            result = attempt(told, case, until, report.figures())
            starts = not result.pop("unstarted", False)
        else:
            result = {"state": SKIPPED, "text": "its process does not start"}
        report.add(case.name, time.monotonic() - started, result)
        say(report.lines[-1])


class Processes:
    """The processes of the groups, by what they are started with."""

    def __init__(self, report: Report, args: argparse.Namespace, python: str, environment: dict[str, str]):
        self.report, self.args, self.python, self.environment = report, args, python, environment
        self.running: dict[Any, Told] = {}

    def of(self, group: Group) -> Told:
        """The group's process, which need not run yet."""
        if group.process() not in self.running:
            args = self.args
            spec = {"device": args.device, "size": args.size, "backend": args.backend, **group.spec}
            told = Told(self.report.part, spec, script=WORKER, python=self.python, log=self.report.log)
            told.environment = self.environment | group.environment
            self.running[group.process()] = told
        return self.running[group.process()]

    def begin(self, group: Group, until: float) -> None:
        """Start the group's process, unless it runs, none of its cases needs it, or there is no time for one."""
        left = until - time.monotonic()
        told = self.of(group)
        if told.process is None and any(not case.missing and case.least < left for case in group.cases):
            told.begin()

    def end_unneeded(self, groups: Sequence[Group]) -> None:
        """End all processes but those of these groups."""
        needed = {group.process() for group in groups}
        for process in [process for process in self.running if process not in needed]:
            end(self.running.pop(process))


def attempt(told: Told, case: Case, until: float, before: dict[str, Any]) -> dict[str, Any]:
    """Run one case in the process of its group, which is started where there is none."""
    if case.missing:
        return {"state": SKIPPED, "text": case.missing}
    left = until - time.monotonic()
    if left < case.least:
        return {"state": SKIPPED, "text": f"{max(left, 0.0):.0f} s are left, it takes about {case.least:.0f}"}
    cut = left < STARTING
    if told.process is None or told.begun:
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
    parts = ["python dev.py card", f"--minutes {args.minutes:g}" if part == PLAN else f"--part {part}"]
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

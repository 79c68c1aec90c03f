"""The command `dev.py card`: arguments, a process for each model, and the report written after every case.

Nothing but the standard library: torch is loaded by the processes that do the work (`worker.py`), so that a process
which hangs, is killed or runs out of memory does not affect the others.
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

from processes import CommandProcess, script

from card.case import Case, Group
from card.cases import PARTS, groups
from card.page import CUT, FAILED, SKIPPED, Report
from card.plan import plan

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cards"
WORKER = script("card.worker")
STARTING = 150.0  # seconds until a process has loaded torch, ComfyUI and its model
PLAN = "plan"  # in place of a part
MINUTES, LIMIT = 12.0, 450.0  # of the plan, and seconds of a part
STOPPED = 128 + signal.SIGTERM


def parse(arguments: Sequence[str]) -> argparse.Namespace:
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
    args = parser.parse_args(arguments)
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
    """Run the plan, or the named parts. Return 1 if a case failed."""
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
                planned, deadline = plan(args.device, args.size, machine), began + 60 * args.minutes
            else:
                planned, deadline = groups(part, args.device, args.size, machine), time.monotonic() + args.limit
            failed += run_groups(args, report, planned, deadline, python, environment)
        return 1 if failed else 0


def run_groups(
    args: argparse.Namespace,
    report: Report,
    planned: Sequence[Group],
    deadline: float,
    python: str,
    environment: dict[str, str],
) -> int:
    """Run the cases of these groups until the deadline. Return the number of failures.

    Groups of one process share it, and it waits while groups of other processes run. During a group that is not timed,
    the process of the next group starts.
    """
    texts = args.only or [""]
    remaining = [replace(g, cases=tuple(c for c in g.cases if any(text in c.name for text in texts))) for g in planned]
    remaining = [group for group in remaining if group.cases]
    report.planned = sum(len(group.cases) for group in remaining)
    limit = deadline - time.monotonic()
    say(f"\n{report.part}: {report.planned} cases, {max(limit, 0):.0f} s at most")
    processes = Processes(report, args, python, environment)
    try:
        for number, group in enumerate(remaining):
            process = processes.process_of(group)
            group_deadline = min(deadline, time.monotonic() + group.share * limit)
            if not group.timed and number + 1 < len(remaining):
                processes.begin(remaining[number + 1], deadline)
            run_group(process, group, group_deadline, report)
            processes.end_unneeded(remaining[number + 1 :])
    finally:
        processes.end_unneeded([])
    report.finish()
    say(f"{report.summary()}\nPage: {report.page_file}")
    return report.count(FAILED)


def run_group(process: CommandProcess, group: Group, deadline: float, report: Report) -> None:
    starts = True
    for case in group.cases:
        started = time.monotonic()
        if starts:
            result = attempt(process, case, deadline, report.figures())
            starts = not result.pop("unstarted", False)
        else:
            result = {"state": SKIPPED, "text": "its process does not start"}
        report.add(case.name, time.monotonic() - started, result)
        say(report.lines[-1])


class Processes:
    """The processes of the groups, by spec and environment."""

    def __init__(self, report: Report, args: argparse.Namespace, python: str, environment: dict[str, str]):
        self.report = report
        self.args = args
        self.python = python
        self.environment = environment
        self.running: dict[Any, CommandProcess] = {}

    def process_of(self, group: Group) -> CommandProcess:
        """Return the group's process, which may not have started yet."""
        if group.process() not in self.running:
            args = self.args
            spec = {"device": args.device, "size": args.size, "backend": args.backend, **group.spec}
            process = CommandProcess(self.report.part, spec, script=WORKER, python=self.python, log=self.report.log)
            process.environment = self.environment | group.environment
            self.running[group.process()] = process
        return self.running[group.process()]

    def begin(self, group: Group, deadline: float) -> None:
        """Start the group's process, unless it runs, none of its cases needs it, or there is no time for one."""
        seconds = deadline - time.monotonic()
        process = self.process_of(group)
        if process.process is None and any(not case.missing and case.least < seconds for case in group.cases):
            process.begin()

    def end_unneeded(self, groups: Sequence[Group]) -> None:
        """End all processes but those of these groups."""
        needed = {group.process() for group in groups}
        for process in [process for process in self.running if process not in needed]:
            end(self.running.pop(process))


def attempt(process: CommandProcess, case: Case, deadline: float, figures: dict[str, Any]) -> dict[str, Any]:
    """Run one case in the process of its group, which is started if necessary."""
    if case.missing:
        return {"state": SKIPPED, "text": case.missing}
    seconds = deadline - time.monotonic()
    if seconds < case.least:
        return {"state": SKIPPED, "text": f"{max(seconds, 0.0):.0f} s are left, it takes about {case.least:.0f}"}
    cut = seconds < STARTING
    if process.process is None or process.is_started:
        process.ended, process.limit = "", min(STARTING, seconds)
        process.launch()
        seconds = deadline - time.monotonic()
    unstarted = bool(process.ended)
    reply: dict[str, Any] = {}
    if not unstarted:
        cut = seconds < case.limit
        process.limit = max(1.0, min(case.limit, seconds))
        reply = process.ask(name=case.name, how=case.settings, before=figures)
    if process.ended:
        reply = {"state": CUT if cut and process.ended.startswith("no reply") else FAILED, "text": process.ended}
        reply["unstarted"] = unstarted
    if process.ended or reply.pop("spoiled", False):
        end(process)
    return reply


def end(process: CommandProcess) -> None:
    """End the process without waiting: its work is done, or it hangs."""
    if process.process is not None:
        process.process.kill()
        process.stop()


def facts(args: argparse.Namespace, python: str, environment: dict[str, str], scratch: Path) -> dict[str, Any]:
    """Ask a process for facts of the machine. Raises SystemExit if there is no such device."""
    spec = {"kind": "facts", "device": args.device}
    process = CommandProcess("facts", spec, script=WORKER, python=python, log=scratch / "facts.log", limit=STARTING)
    process.environment = environment
    try:
        machine = process.launch()
    finally:
        end(process)
    if process.ended:
        raise SystemExit(f"{python} can't be used: {process.ended}")
    if not machine["card"]:
        raise SystemExit(
            f"torch {machine['torch']} finds no CUDA device here; with --device cpu the command is tried at tiny sizes."
        )
    return machine | {"driver": driver_version(), "commit": commit()}


def environment_of(comfyui: Path, scratch: Path) -> dict[str, str]:
    """Return the environment of a process. Its cache of compiled code is empty, so compile times are those of a first
    run."""
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
    if not (program := shutil.which("nvidia-smi")):
        return ""
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    return (subprocess.run(query, capture_output=True, text=True).stdout.splitlines() or [""])[0].strip()


def commit() -> str:
    """Return the commit of the checkout, empty if it is none."""
    if not (git := shutil.which("git")) or not (ROOT / ".git").exists():
        return ""
    command = [git, "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


@contextmanager
def stopped_by_a_signal() -> Iterator[None]:
    """Let SIGTERM, as `timeout` sends it, end this as an exception does: with its process, and the page as it is."""

    def stop(*_: Any) -> None:
        raise SystemExit(STOPPED)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        signal.signal(signal.SIGTERM, previous)


def say(text: str) -> None:
    print(text, flush=True)

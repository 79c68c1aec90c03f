"""Contestants in their own processes, which take commands in JSON: one command a line, and one reply a line."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

HERE = Path(__file__).resolve().parent


def script(name: str) -> tuple[str, str]:
    """Return the interpreter's arguments that run a script of this folder by room and name, such as step.contestant."""
    return str(HERE), name


def processor() -> str:
    """Name the CPU of this machine."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass
class Measured:
    """Replies of one contestant. spec: its arguments; first: in the warm-up; rounds: in each round;
    memory: in the steps that count allocations; ended: the reason why it stopped, if it did."""

    name: str
    spec: dict[str, Any]
    first: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)
    ended: str = ""

    def round_values(self, figure: str) -> list[list[float]]:
        return [reply[figure] for reply in self.rounds]


@dataclass
class CommandProcess(Measured):
    """A process that takes commands.

    script: the interpreter's arguments, to which `spec` comes: see `script`.
    python: the interpreter that runs it.
    limit: seconds that a reply may take; a process that takes longer is killed. None waits for ever.
    is_started: it was started, and its first line is not read yet.
    """

    script: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    log: Path = Path()
    python: str = sys.executable
    limit: float | None = None
    process: subprocess.Popen[str] | None = None
    is_started: bool = False
    replies: SimpleQueue[str] = field(default_factory=SimpleQueue)

    def launch(self) -> dict[str, Any]:
        """Start the process, unless it is started, and return the line that it sends when it is ready."""
        if not self.is_started:
            self.begin()
        self.is_started = False
        return self.read()

    def begin(self) -> None:
        """Start the process without waiting until it is ready."""
        command = [self.python, *self.script, json.dumps(self.spec)]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=self.environment
            )
        self.replies = SimpleQueue()  # one that was launched before may still be ending
        # A thread, since only that can wait for a line of a pipe for a limited time on every system.
        Thread(target=_pass_on, args=(self.process.stdout, self.replies), daemon=True).start()
        self.is_started = True

    def ask(self, **command: Any) -> dict[str, Any]:
        if self.ended:
            return {}
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; `read` says why
        return self.read()

    def read(self) -> dict[str, Any]:
        """Return the next reply; empty if the process has ended, takes too long, or replies with a reason in
        `skipped`."""
        assert self.process is not None
        try:
            line = self.replies.get(timeout=self.limit)
        except Empty:
            self.process.kill()
            self.ended = f"no reply in {self.limit:.0f} s"
            return {}
        if line:
            reply = json.loads(line)
            self.ended = reply.pop("skipped", "")
            return reply
        lines = self.log.read_text(errors="replace").strip().splitlines()
        self.ended = f"ended: {lines[-1][:200] if lines else 'no message'}"
        return {}

    def stop(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.process.kill()
            self.process, self.is_started = None, False


def _pass_on(lines: Iterable[str], replies: SimpleQueue[str]) -> None:
    """Pass each line on, and an empty one behind the last."""
    for line in lines:
        replies.put(line)
    replies.put("")


def take_over_stdout() -> Callable[[dict[str, Any]], None]:
    """Return a function that sends a reply, for use in the process of the contestant. Other prints go to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    return reply

"""Contestants in processes of their own, told what to do in JSON: one command a line, and one reply a line."""

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


def processor() -> str:
    """Name the CPU of this machine."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass
class Measured:
    """Replies of one contestant. spec: what it was told to do; first: in the warm-up; rounds: in each round;
    memory: in the steps that count allocations; ended: why it took no more part, if it did not."""

    name: str
    spec: dict[str, Any]
    first: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)
    ended: str = ""

    def of_rounds(self, figure: str) -> list[list[float]]:
        return [reply[figure] for reply in self.rounds]


@dataclass
class Told(Measured):
    """A process that does what it is told.

    script: beside this file; it gets `spec` as its argument.
    python: the interpreter that runs it.
    limit: seconds that a reply may take; a process that takes longer is killed. None waits for ever.
    begun: it was started, and its first line is not read yet.
    """

    script: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    log: Path = Path()
    python: str = sys.executable
    limit: float | None = None
    process: subprocess.Popen[str] | None = None
    begun: bool = False
    replies: SimpleQueue[str] = field(default_factory=SimpleQueue)

    def launch(self) -> dict[str, Any]:
        """Starts the process, unless it has begun, and returns the line that it sends when it is ready."""
        if not self.begun:
            self.begin()
        self.begun = False
        return self.read()

    def begin(self) -> None:
        """Starts the process and does not wait until it is ready."""
        command = [self.python, str(HERE / self.script), json.dumps(self.spec)]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=self.environment
            )
        self.replies = SimpleQueue()  # one that was launched before may still be ending
        # A thread, since only that can wait for a line of a pipe for a limited time on every system.
        Thread(target=_pass_on, args=(self.process.stdout, self.replies), daemon=True).start()
        self.begun = True

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
        """The next reply; none where the process has ended, takes too long, or says `skipped` and why."""
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
        written = self.log.read_text(errors="replace").strip().splitlines()
        self.ended = f"ended: {written[-1][:200] if written else 'no message'}"
        return {}

    def stop(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.process.kill()
            self.process, self.begun = None, False


def _pass_on(lines: Iterable[str], replies: SimpleQueue[str]) -> None:
    """Pass each line on, and an empty one behind the last."""
    for line in lines:
        replies.put(line)
    replies.put("")


def take_over_stdout() -> Callable[[dict[str, Any]], None]:
    """In the process that is told: returns what sends a reply. Whatever else is printed goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    return reply

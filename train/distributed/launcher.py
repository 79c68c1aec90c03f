"""Processes that train for a node of a running ComfyUI: `run.py --launch` in its own process group.

Server and processes communicate through files in a folder that exists for one job only: the prompt for run.py, the
events that it logs, and the user's requests. So a later job cannot read anything of an earlier one.
"""

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from ..report.observer import SAMPLE, SAVE, STOP

log = logging.getLogger(__name__)

RUN = Path(__file__).parents[2] / "run.py"
# Environment variables read by run.py and its processes; the first by `Job.current`.
JOB, PARENT = "TESSERA_JOB", "TESSERA_PARENT"
GRACE = 660.0  # seconds for the processes to finish a micro-batch and save: torchrun's 600 and some more
_PAUSE = 0.05
# Set by the launcher of this ComfyUI, such as Slurm or torchrun; a child would take itself for one of its processes.
_OTHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME")
_PREFIXES = ("LOCAL_", "GROUP_WORLD", "ROLE_WORLD", "TORCHELASTIC_", "TESSERA_WORLD")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Facts:
    """Facts of the node that the processes train for.

    key: key of the first run that they train, by which they verify that they built the same inputs from the prompt.
    files: companion files of the LoRA, from the node's own graph.
    queued: entries of run.json about the prompt.
    spare: fallback location for a finished LoRA that can't be written to the run's folder.
    """

    key: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    queued: Mapping[str, str] = field(default_factory=dict)
    spare: str = ""


class Job:
    """Folder of a job, see above."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prompt = folder / "prompt.json"
        self.log = folder / "log.jsonl"
        self.output = folder / "output.txt"
        self._facts = folder / "facts.json"

    @classmethod
    @cache
    def current(cls) -> "Job | None":
        """Return the job that this process trains for; None in every other process."""
        folder = os.environ.get(JOB)
        return Job(Path(folder)) if folder else None

    def write(self, prompt: Mapping[str, Any], extra_data: Mapping[str, Any], facts: Facts) -> None:
        """Write the prompt and the facts. Raises ValueError if the prompt holds a value that JSON can't represent."""
        try:
            text = json.dumps({"prompt": prompt, "extra_data": extra_data})
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                "devices: an input of the workflow is not a plain value, so it can't be passed to another process; set "
                "devices to 'this one'."
            ) from error
        self.prompt.write_text(text, encoding="utf-8")
        self._facts.write_text(json.dumps(asdict(facts)), encoding="utf-8")

    @cached_property
    def facts(self) -> Facts:
        """The facts written by `write`."""
        return Facts(**json.loads(self._facts.read_text(encoding="utf-8")))

    def ask(self, request: str) -> None:
        """Request SAVE, STOP or SAMPLE from the run after its next step."""
        (self.folder / request).touch()

    def take_requests(self) -> frozenset[str]:
        """Return the pending requests and clear them; for the one process that reports."""
        requests = frozenset(request for request in (SAVE, STOP, SAMPLE) if (self.folder / request).exists())
        for request in requests:
            (self.folder / request).unlink()
        return requests

    def events(self) -> Iterator[dict[str, Any] | None]:
        """Yield the logged events as they arrive; None when there is nothing more for now."""
        rest = b""
        with contextlib.ExitStack() as stack:
            file: Any = None
            while True:
                if file is None and self.log.exists():
                    file = stack.enter_context(self.log.open("rb"))
                new = file.read() if file is not None else b""
                *lines, rest = (rest + new).split(b"\n")
                for line in lines:
                    yield json.loads(line)
                if not lines:
                    yield None

    def output_tail(self, lines: int = 40) -> list[str]:
        """Return the last output lines of the processes."""
        try:
            return self.output.read_text("utf-8", "replace").splitlines()[-lines:]
        except OSError:
            return []

    def last_words(self) -> str:
        """Return the last output line that explains why the processes end; empty without output."""
        lines = [line.strip() for line in self.output_tail() if line.strip()]
        device_lines = [line for line in lines if re.match(r"Device \d+: ", line)]
        return (device_lines or lines or [""])[-1]


class Launched:
    """Running `run.py --launch` process of a job."""

    def __init__(self, job: Job, devices: Sequence[int], on_cpu: bool, comfyui: Path, options: Sequence[str]) -> None:
        """comfyui: ComfyUI's folder. options: its command line options."""
        arguments = [str(RUN), str(job.prompt), "--log", str(job.log), "--launch", str(len(devices))]
        with job.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *arguments, "--", *options],
                env=child_environment(os.environ, [] if on_cpu else devices, comfyui, job.folder),
                stdin=subprocess.PIPE,  # its end of file signals that this process is gone
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.job, self.events = job, job.events()

    def follow(
        self,
        on_event: Callable[[Mapping[str, Any]], None],
        check_interrupted: Callable[[], None],
        user_requests: Callable[[], AbstractSet[str]],
    ) -> int:
        """Follow the processes to their end; returns the exit code of run.py.

        on_event: called with each event of its log.
        check_interrupted: may raise; then the processes are asked to save and end. If it raises again, they are killed
            immediately.
        user_requests: returns the user's requests, which are passed on to the processes.
        """
        try:
            while self.process.poll() is None:
                self._tell_new(on_event)
                check_interrupted()
                for request in user_requests():
                    self.job.ask(request)
                time.sleep(_PAUSE)
        except BaseException:
            self._end(on_event, check_interrupted)
            raise
        finally:
            self._tell_new(on_event)
        return self.process.returncode

    def _tell_new(self, on_event: Callable[[Mapping[str, Any]], None]) -> None:
        while (event := next(self.events)) is not None:
            on_event(event)

    def _end(self, on_event: Callable[[Mapping[str, Any]], None], check_interrupted: Callable[[], None]) -> None:
        end = time.monotonic() + GRACE
        with contextlib.suppress(BaseException):
            self.process.send_signal(signal.SIGTERM)
            while self.process.poll() is None and time.monotonic() < end:
                self._tell_new(on_event)
                check_interrupted()
                time.sleep(_PAUSE)
        if self.process.poll() is None:
            log.warning("The processes that train have not ended by themselves and are killed.")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # its children end with it, see run.py
        self.process.wait()


def child_environment(inherited: Mapping[str, str], devices: Sequence[int], comfyui: Path, job: Path) -> dict[str, str]:
    """Build the environment of run.py.

    inherited: environment of this process.
    devices: numbers of the devices to use, as this process counts them; empty on the CPU.
    comfyui: ComfyUI's folder.
    """
    environment = {
        name: text for name, text in inherited.items() if name not in _OTHERS and not name.startswith(_PREFIXES)
    }
    environment |= {"COMFYUI_PATH": str(comfyui), JOB: str(job), PARENT: str(os.getpid())}
    if sys.flags.no_user_site:
        environment["PYTHONNOUSERSITE"] = "1"
    if devices:
        visible = next((inherited[name] for name in _VISIBLE if inherited.get(name)), None)
        names = [name.strip() for name in visible.split(",")] if visible else None
        environment |= dict.fromkeys(_VISIBLE, ",".join(names[device] if names else str(device) for device in devices))
    return environment


def child_options(options: Sequence[str], folders: Mapping[str, str]) -> list[str]:
    """Build ComfyUI's options for run.py: the options of this process without those that select a device, open the
    browser or enable the manager.

    folders: values of options that this process may have changed since its start, such as `--output-directory`.
    """
    selected, remaining = list[str](), list(options)
    while remaining:
        name, equals, _ = (option := remaining.pop(0)).partition("=")
        if name.startswith(("--cuda-d", "--default-d")) and not name.startswith("--default-h"):
            remaining = remaining if equals else remaining[1:]
        elif name not in ("--auto-launch", "--enable-manager"):
            selected.append(option)
    return selected + [part for pair in folders.items() for part in pair]

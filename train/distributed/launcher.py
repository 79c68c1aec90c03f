"""Processes that train for a node of a running ComfyUI: `run.py --launch` in a process group of its own.

Server and processes talk by the files of a folder that is made for one job and goes with it: what run.py is to execute,
the events that it logs, and what the user asks of the run. So nothing of an earlier job can be read by a later one.
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

from ..observer import SAMPLE, SAVE, STOP

log = logging.getLogger(__name__)

RUN = Path(__file__).parents[2] / "run.py"
# Read by run.py and its processes; the first by `Job.current`.
JOB, PARENT = "TESSERA_JOB", "TESSERA_PARENT"
GRACE = 660.0  # seconds in which the processes may finish a micro-batch and save: torchrun's 600 and what follows
_PAUSE = 0.05
# Set by what started this ComfyUI, such as Slurm or torchrun; a process below would take itself for one of those.
_OTHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME")
_PREFIXES = ("LOCAL_", "GROUP_WORLD", "ROLE_WORLD", "TORCHELASTIC_", "TESSERA_WORLD")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Facts:
    """Facts of the node that the processes train for.

    key: key of the first run that they train, by which they see that they have made the same inputs of the prompt.
    files: companion files of the LoRA, as the node's own graph gives them.
    queued: what run.json says of the prompt.
    spare: where a finished LoRA is tried to be written that the run's folder can't take.
    """

    key: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    queued: Mapping[str, str] = field(default_factory=dict)
    spare: str = ""


class Job:
    """Folder of a job, see above."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prompt, self.log, self.output = folder / "prompt.json", folder / "log.jsonl", folder / "output.txt"
        self._facts = folder / "facts.json"

    @classmethod
    @cache
    def current(cls) -> "Job | None":
        """Return the job that this process trains for; None in every other process."""
        folder = os.environ.get(JOB)
        return Job(Path(folder)) if folder else None

    def write(self, prompt: Mapping[str, Any], extra_data: Mapping[str, Any], facts: Facts) -> None:
        """Write what is to be executed. Raises ValueError where the prompt holds what no file can."""
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
        """The facts that were written."""
        return Facts(**json.loads(self._facts.read_text(encoding="utf-8")))

    def ask(self, what: str) -> None:
        """Ask something of the run after its next step: SAVE, STOP or SAMPLE."""
        (self.folder / what).touch()

    def take_asked(self) -> frozenset[str]:
        """Return, once, what was asked for; for the one process that reports."""
        asked = frozenset(what for what in (SAVE, STOP, SAMPLE) if (self.folder / what).exists())
        for what in asked:
            (self.folder / what).unlink()
        return asked

    def events(self) -> Iterator[dict[str, Any] | None]:
        """Yield what is logged, as it comes; None where there is no more for now."""
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
        """Return the last lines that the processes wrote."""
        try:
            return self.output.read_text("utf-8", "replace").splitlines()[-lines:]
        except OSError:
            return []

    def last_words(self) -> str:
        """Return what the processes said last of why they end; empty where they said nothing."""
        lines = [line.strip() for line in self.output_tail() if line.strip()]
        named = [line for line in lines if re.match(r"Device \d+: ", line)]
        return (named or lines or [""])[-1]


class Launched:
    """`run.py --launch` for a job, while it runs."""

    def __init__(self, job: Job, devices: Sequence[int], on_cpu: bool, comfyui: Path, options: Sequence[str]) -> None:
        """comfyui: ComfyUI's folder. options: its command line options."""
        own = [str(RUN), str(job.prompt), "--log", str(job.log), "--launch", str(len(devices))]
        with job.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *own, "--", *options],
                env=child_environment(os.environ, [] if on_cpu else devices, comfyui, job.folder),
                stdin=subprocess.PIPE,  # which tells it when this process is gone
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.job, self.events = job, job.events()

    def follow(
        self,
        tell: Callable[[Mapping[str, Any]], None],
        check_interrupted: Callable[[], None],
        asked: Callable[[], AbstractSet[str]],
    ) -> int:
        """Follow the processes to their end; returns the exit code of run.py.

        tell: gets each event of its log. check_interrupted: may raise; then the processes are asked to save and end,
        and where it raises again they are ended at once.
        """
        try:
            while self.process.poll() is None:
                self._tell_new(tell)
                check_interrupted()
                for what in asked():
                    self.job.ask(what)
                time.sleep(_PAUSE)
        except BaseException:
            self._end(tell, check_interrupted)
            raise
        finally:
            self._tell_new(tell)
        return self.process.returncode

    def _tell_new(self, tell: Callable[[Mapping[str, Any]], None]) -> None:
        while (event := next(self.events)) is not None:
            tell(event)

    def _end(self, tell: Callable[[Mapping[str, Any]], None], check_interrupted: Callable[[], None]) -> None:
        end = time.monotonic() + GRACE
        with contextlib.suppress(BaseException):
            self.process.send_signal(signal.SIGTERM)
            while self.process.poll() is None and time.monotonic() < end:
                self._tell_new(tell)
                check_interrupted()
                time.sleep(_PAUSE)
        if self.process.poll() is None:
            log.warning("The processes that train have not ended by themselves and are killed.")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # those below it end with it, see run.py
        self.process.wait()


def child_environment(ours: Mapping[str, str], devices: Sequence[int], comfyui: Path, job: Path) -> dict[str, str]:
    """Make the environment of run.py.

    ours: that of this process. devices: numbers of those to use, as this process counts them; empty on the CPU.
    comfyui: ComfyUI's folder.
    """
    made = {name: text for name, text in ours.items() if name not in _OTHERS and not name.startswith(_PREFIXES)}
    made |= {"COMFYUI_PATH": str(comfyui), JOB: str(job), PARENT: str(os.getpid())}
    if sys.flags.no_user_site:
        made["PYTHONNOUSERSITE"] = "1"
    if devices:
        visible = next((ours[name] for name in _VISIBLE if ours.get(name)), None)
        names = [one.strip() for one in visible.split(",")] if visible else None
        made |= dict.fromkeys(_VISIBLE, ",".join(names[one] if names else str(one) for one in devices))
    return made


def child_options(ours: Sequence[str], folders: Mapping[str, str]) -> list[str]:
    """Make ComfyUI's options for run.py: those of this process, less what chooses a device or listens.

    folders: values of options that this process may have changed since, such as `--output-directory`.
    """
    kept, left = list[str](), list(ours)
    while left:
        name, equals, _ = (one := left.pop(0)).partition("=")
        if name.startswith(("--cuda-d", "--default-d")) and not name.startswith("--default-h"):
            left = left if equals else left[1:]
        elif name not in ("--auto-launch", "--enable-manager"):
            kept.append(one)
    return kept + [part for pair in folders.items() for part in pair]

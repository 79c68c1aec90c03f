"""Progress of a run: ComfyUI's progress bar and text, and live events for the browser."""

import logging
from pathlib import Path
from typing import Any

import folder_paths
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy.utils import ProgressBar
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ...common.progress import Progress
from ...train.distributed.launcher import Job
from ...train.report.observer import StepReport
from . import training_now

log = logging.getLogger(__name__)

EVENT = "tessera.train"


def client_server() -> PromptServer | None:
    """Return ComfyUI's server; None if it does not run or the queueing client is unknown."""
    server = getattr(PromptServer, "instance", None)
    return server if server is not None and server.client_id is not None else None


def show_progress_text(node_id: str | None, text: str) -> None:
    """Show a line of progress on a running node, for the client that queued it."""
    if node_id is not None and (server := client_server()):
        server.send_progress_text(text, node_id, server.client_id)


def node_progress(node_id: str | None) -> Progress:
    """Make a progress callback for the running node: its bar, and a line of text if ComfyUI's server runs."""
    bar = ProgressBar(1, node_id=node_id)

    def show(completed: int, total: int, text: str) -> None:
        bar.update_absolute(completed, total)
        show_progress_text(node_id, text)

    return show


def place_in_output(path: Path) -> Path:
    """Return the path of a run's file relative to ComfyUI's output folder."""
    return path.relative_to(folder_paths.get_output_directory())


def prompt_id() -> str:
    """Return the id of the prompt that is being executed; empty outside of one."""
    context = get_executing_context()
    return context.prompt_id if context else ""


class ServerObserver:
    """Observer that sends events `{"node": id, "prompt_id": …, "kind": …, …}` to the client that queued the run."""

    can_pause = False  # whether a run can be paused

    def __init__(self, node_id: str, steps: int):
        self.node_id = node_id
        self.prompt_id = prompt_id()
        self.bar = ProgressBar(steps, node_id=node_id)
        self.has_panel = False  # whether the page shows the run, with its phase and its step

    def _send(self, kind: str, **values: Any) -> None:
        if server := client_server():
            event = {"node": self.node_id, "prompt_id": self.prompt_id, "kind": kind, **values}
            server.send_sync(EVENT, event, server.client_id)

    def began(self, folder: Path) -> None:
        self.has_panel = True
        training_now.begin(folder, self.node_id or "", self.prompt_id, self.can_pause)
        self._send("begin", folder=place_in_output(folder).as_posix())

    def ended(self, status: str, text: str) -> None:
        training_now.end()
        self._send("end", status=status, text=text)

    def phase(self, text: str) -> None:
        training_now.phase(text)
        log.info(text)
        if not self.has_panel:
            show_progress_text(self.node_id, text)
        self._send("phase", text=text)

    def note(self, text: str) -> None:
        log.info(text)
        self._send("note", text=text)

    def step(self, report: StepReport) -> None:
        training_now.step(report)
        self.bar.update_absolute(report.step, report.steps)
        self._send(
            "step",
            step=report.step,
            steps=report.steps,
            loss=report.loss,
            learning_rate=report.learning_rate,
            seconds_per_step=report.seconds_per_step,
            seconds_left=report.seconds_left,
        )

    def saved(self, path: Path) -> None:
        log.info("Saved %s", path.name)
        self._send("saved", file=path.name)

    def previewed(self, sheet: Path, step: int) -> None:
        """Send the sheet's path in ComfyUI's output folder, from which the browser reads it."""
        place = place_in_output(sheet)
        self._send("preview", step=step, filename=place.name, subfolder=place.parent.as_posix(), type="output")

    def validated(self, step: int, loss: float) -> None:
        log.info("Validation loss %.5f at step %d", loss, step)
        self._send("validation", step=step, loss=loss)

    def take_requests(self) -> frozenset[str]:
        job = Job.current()
        return training_now.take_requests() | (job.take_requests() if job is not None else frozenset())

    def check_interrupted(self) -> None:
        throw_exception_if_processing_interrupted()

"""Train LoRA on several devices, by running the graph in separate processes."""

import logging
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comfy.model_management
import folder_paths
import torch
from comfy_execution.graph_utils import is_link

from ...common.core import command_line, end_of_node
from ...common.files import read_tensors
from ...common.processes import is_switched_on
from ...lora.files.lora_model import LoraModel
from ...memory.weights.frozen import unload
from ...train.config.settings import TrainSettings
from ...train.distributed.device_list import THIS_ONE, listed_devices
from ...train.distributed.launcher import Facts, Job, Launched, child_options
from ...train.distributed.share import shard_step
from ...train.preflight.run_start import RunStart
from ...train.report.errors import TrainingStopped
from ...train.report.observer import StepReport
from ...train.runs.run_folder import RunFolder
from ...train.train_lora import STOPPED, TrainResult, read_finished
from ..common.progress import ServerObserver
from ..common.saved_workflow import queueable
from .run import prompt_facts, runs_folder

log = logging.getLogger(__name__)

_OTHER_RUN = (
    "devices: the other processes got a different run than this one, so an input of Train LoRA is not the same each "
    "time it is made, such as latents from core's VAE Encode or from a node that uses random numbers; use Prepare "
    f"Dataset for the data, save other inputs to files and load those, or set devices to '{THIS_ONE}'."
)


def chosen_devices(text: str) -> list[int]:
    """Return the devices to train on in separate processes; empty to train here.

    text: the `devices` input.

    Raises ValueError if it names none, one twice, or more than exist.
    """
    if is_switched_on():  # run.py has assigned the devices
        return []
    device = comfy.model_management.get_torch_device()
    device_count = torch.cuda.device_count() if device.type == "cuda" else 1
    current = device.index if device.index is not None else torch.cuda.current_device() if device_count > 1 else 0
    devices = listed_devices(text, device_count, current, on_cpu=device.type == "cpu")
    if devices == [current] or (device.type == "cpu" and len(devices) == 1):
        return []
    if sys.platform == "win32":
        raise ValueError(
            f"devices is {text[:40]!r}, which needs torchrun, and torch for Windows does not start it; run ComfyUI in "
            f"WSL, or write '{THIS_ONE}'."
        )
    return devices


def needed_prompt(prompt: Mapping[str, Any] | None, node_id: str | None) -> dict[str, Any]:
    """Return the nodes of a prompt that Train LoRA needs, including itself, set to train on its assigned device.

    Raises ValueError if the prompt does not contain all of its upstream nodes.
    """
    needed, pending = set[str](), [node_id]
    while pending:
        number = pending.pop()
        if number in needed:
            continue
        if prompt is None or number is None or number not in prompt:
            raise ValueError(
                "devices: Train LoRA or one of its inputs was created while the workflow ran, by a loop for example, "
                f"so other processes can't run it; set devices to '{THIS_ONE}'."
            )
        needed.add(number)
        node = prompt[number]
        for name, value in node["inputs"].items():
            if is_link(value):
                pending.append(value[0])
            elif isinstance(value, str) and value.endswith(" [temp]"):
                raise ValueError(
                    f"devices: {name} of {node['class_type']} ({number}) is in ComfyUI's temporary folder, which other "
                    "processes do not have; put the file into the input folder and choose it there."
                )
    assert prompt is not None and node_id is not None
    nodes = queueable(prompt)
    train = {**nodes[node_id], "inputs": {**nodes[node_id]["inputs"], "devices": THIS_ONE}}
    return {number: train if number == node_id else node for number, node in nodes.items() if number in needed}


class OnDevices:
    """Trains the runs of a node on several devices when the first of them is requested."""

    def __init__(
        self,
        devices: list[int],
        prompt: Mapping[str, Any] | None,
        extra_pnginfo: Any,
        settings: TrainSettings,
        files: Mapping[str, str],
        observer: ServerObserver,
    ) -> None:
        """prompt: the prompt executed now. files: as returned by `workflow_files`.

        Raises ValueError if other processes can't make the inputs of the node, or can't share its steps.
        """
        self.devices = devices
        self.observer = observer
        self.files = files
        self.extra = extra_pnginfo
        self.prompt = needed_prompt(prompt, observer.node_id)
        self.said = ""
        self.is_done = False
        self.is_running = False
        self.folders = list[Path]()
        shard_step(0, len(devices), settings.batch_size, settings.gradient_accumulation)

    def __call__(self, run_start: RunStart) -> TrainResult:
        """Return the result of a run; the first call trains all runs of the node."""
        if not self.is_done:
            self.train(run_start.key)
            self.is_done = True
        for folder in (RunFolder(path, run_start.folder.name) for path in (*self.folders, run_start.folder.path)):
            summary = folder.read_summary()
            if summary is None or summary["key"] != run_start.key:
                continue
            if summary["status"] in ("finished", STOPPED):
                return read_finished(folder)
            copy = Path(folder_paths.get_temp_directory(), f"{folder.path.name}.safetensors")
            if copy.is_file():  # it could not be saved in the run's folder
                lora = LoraModel.from_file(*read_tensors(copy))
                return TrainResult(lora, summary["loss"], folder.lora_path, summary, copy)
        raise TrainingStopped(_OTHER_RUN)

    def train(self, key: str) -> None:
        """Run the graph in separate processes, to its end. key: key of the first run."""
        observer, count = self.observer, len(self.devices)
        observer.phase(f"Starting {'a process' if count == 1 else f'{count} processes, one for each device'}")
        on_cpu = comfy.model_management.get_torch_device().type == "cpu"
        with tempfile.TemporaryDirectory(prefix="tessera-devices-", ignore_cleanup_errors=True) as folder:
            job = Job(Path(folder))
            spare = folder_paths.get_temp_directory()
            extra = {} if self.extra is None else {"extra_pnginfo": self.extra}
            job.write(self.prompt, extra, Facts(key, self.files, prompt_facts(), spare))
            unload()
            end_of_node()
            folders = {
                "--output-directory": folder_paths.get_output_directory(),
                "--input-directory": folder_paths.get_input_directory(),
                "--user-directory": folder_paths.get_user_directory(),
                "--temp-directory": folder,
                "--database-url": "sqlite:///:memory:",  # this server's file is locked
            }
            options = child_options(command_line(), folders)
            launched = Launched(job, self.devices, on_cpu, Path(folder_paths.__file__).parent, options)
            try:
                code = launched.follow(self.tell, observer.check_interrupted, observer.take_requests)
                if code != 0:
                    words = self.said or job.last_words() or "The training processes were ended from outside."
                    log.error("run.py ended with %d; it wrote:\n%s", code, "\n".join(job.output_tail()))
                    raise TrainingStopped(words)
            except BaseException as error:
                if self.is_running:  # the processes could not report it themselves
                    observer.ended("failed", str(error) or type(error).__name__)
                raise

    def tell(self, event: Mapping[str, Any]) -> None:
        """Report an event from run.py's log as a run in this process would."""
        observer, kind = self.observer, event.get("kind")
        if event["event"] == "error":
            node = None if event["node"] == observer.node_id else self.prompt.get(event["node"] or "")
            self.said = ("" if node is None else f"{node['class_type']} ({event['node']}): ") + event["message"]
        elif event["event"] == "node" and event["node"] != observer.node_id:
            observer.phase(f"In {len(self.devices)} processes: {event['class_type']}")
        elif event["event"] == "text" and event["node"] != observer.node_id:
            observer.phase(event["text"])
        elif event["event"] != "train":
            return
        elif kind == "begin":
            self.is_running = True
            self.folders.append(Path(folder_paths.get_output_directory(), event["folder"]))
            observer.began(self.folders[-1])
        elif kind == "end":
            self.is_running = False
            observer.ended(event["status"], event["text"])
        elif kind in ("phase", "note"):
            getattr(observer, kind)(event["text"])
        elif kind == "step":
            names = ("step", "steps", "loss", "learning_rate", "seconds_per_step", "seconds_left")
            observer.step(StepReport(*(event[name] for name in names)))
        elif kind == "saved":
            observer.saved(runs_folder() / event["file"])
        elif kind == "preview":
            sheet = Path(folder_paths.get_output_directory(), event["subfolder"], event["filename"])
            observer.previewed(sheet, event["step"])
        elif kind == "validation":
            observer.validated(event["step"], event["loss"])


def stopped_before(run_start: RunStart) -> TrainResult | None:
    """Return the stopped run of a node upstream of the one that trains here: its LoRA was passed on."""
    summary = run_start.folder.read_summary()
    is_it = summary is not None and summary["key"] == run_start.key and summary["status"] == STOPPED
    return read_finished(run_start.folder) if is_it else None


class SameRun:
    """Check, in a process that trains for a server's node, that its first run is the one that the node requests.

    Raises ValueError if it is not.
    """

    def __init__(self, key: str) -> None:
        self.key: str | None = key

    def __call__(self, run_start: RunStart) -> None:
        key, self.key = self.key, None
        if key not in (None, run_start.key):
            raise ValueError(_OTHER_RUN)

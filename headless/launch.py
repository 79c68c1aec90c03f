"""Launch of one process per device with torchrun, for `--launch`."""

import importlib
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .comfyui import RUN, device_count
from .errors import FAILED, TERMINATED, TRY_AGAIN, WRONG, UsageError
from .parent import PARENT
from .rank import check_many
from .reports import saved_a_state
from .workflow import Prompt


def check_launch(devices: int, prompt: Prompt, options: Sequence[str]) -> None:
    """Raise UsageError if this number of devices can't be launched."""
    if sys.platform == "win32":
        raise UsageError(
            "--launch needs torchrun, which torch for Windows does not start; use WSL, or leave --launch out."
        )
    if devices < 1:
        raise UsageError(f"--launch is {devices}; give the number of devices to train on.")
    check_many(prompt, options)
    if "--cpu" in options:
        return
    available = device_count()
    if available < devices:
        fix = f"give {available} or fewer" if available else "put -- --cpu at the end to run on the CPU"
        raise UsageError(f"--launch is {devices}, and torch sees {available} CUDA devices here; {fix}.")


def launch(devices: int, arguments: Sequence[str], result: str | None) -> int:
    """Start this file once per device with torchrun. Returns the exit code of the first; prints which device failed."""
    own_arguments = list(arguments)
    end = own_arguments.index("--") if "--" in own_arguments else len(own_arguments)
    comfyui_arguments, own_arguments = own_arguments[end:], own_arguments[:end]
    forwarded: list[str] = []
    while own_arguments:
        argument = own_arguments.pop(0)
        name, equals, _ = argument.partition("=")
        if name in ("--launch", "--result"):
            own_arguments = own_arguments if equals else own_arguments[1:]
        else:
            forwarded.append(argument)
    with tempfile.TemporaryDirectory(prefix="tessera-launch-") as folder:
        path = result or str(Path(folder, "result.json"))
        torchrun = [
            "--standalone",
            f"--nproc-per-node={devices}",
            "--",
            str(RUN),
            *forwarded,
            "--result",
            path,
        ]
        failed = torchrun_failure([*torchrun, *comfyui_arguments], devices)
        try:
            outcome = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            outcome = {}
    code = outcome.get("code")
    if failed is not None:
        rank, exit_code = failed
        if exit_code < 0:
            print(f"Device {rank}: its process was ended by {signal.Signals(-exit_code).name}.", file=sys.stderr)
        if rank > 0 and exit_code == WRONG:
            return WRONG
    elif code is not None:
        return int(code)
    else:
        code = TERMINATED  # ended by a signal while the first one started, or because it took too long to end
    if code is None or code == TERMINATED:
        can_resume = "output" in outcome and saved_a_state(outcome["output"], outcome["started"])
        return TRY_AGAIN if can_resume else FAILED if code is None else int(code)
    return int(code)


def torchrun_failure(arguments: Sequence[str], devices: int) -> tuple[int, int] | None:
    """Run torchrun. Returns rank and exit code of the process that failed first; None if none failed by itself."""
    errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    api = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    os.environ[PARENT] = str(os.getpid())  # read by the devices' processes
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Seconds until torchrun kills a process that it has asked to end: a long micro-batch precedes the save.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    # torchrun applies it if it is itself asked to end; if a process fails, it gives the others only 30 seconds.
    close = api.PContext.close

    def patient(context: Any, death_sig: Any = None, timeout: int = 30) -> None:
        close(context, death_sig, max(timeout, int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])))

    api.PContext.close = patient
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // devices)))  # torchrun would set 1
    for name in ("torch.distributed.elastic", "torch.distributed.run"):  # relevant errors are reported in a sentence
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        importlib.import_module("torch.distributed.run").main(list(arguments))
    except errors.ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return rank, failure.exitcode
    except (api.SignalException, KeyboardInterrupt):
        return None
    return None

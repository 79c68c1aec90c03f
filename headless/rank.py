"""Rank of this process among those that train together."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .comfyui import see_devices
from .errors import UsageError
from .workflow import TRAIN, Prompt


class Rank(NamedTuple):
    """This process among those started by torchrun, one per device; alone without torchrun.

    rank: global rank. Rank 0 writes and reports.
    size: world size.
    local: local rank on this machine.
    """

    rank: int = 0
    size: int = 1
    local: int = 0

    @classmethod
    def from_environment(cls) -> "Rank":
        """Read the environment variables set by torchrun."""
        values = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")]
        if None in values or int(values[1] or 1) < 2:
            return cls()
        return cls(*(int(value or 0) for value in values[:3]))

    def with_rank(self, text: str) -> str:
        return f"Device {self.rank}: {text}" if self.rank else text

    @contextlib.contextmanager
    def prepared(self, prompt: Prompt, options: Sequence[str]) -> Iterator[list[str]]:
        """Select this process's device, and yield ComfyUI's options for it."""
        if self.size == 1:
            yield list(options)
            return
        check_many(prompt, options)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES"))
        devices = None if visible is None else [device for device in visible.split(",") if device.strip()]
        if devices is not None and "--cpu" not in options:
            if self.local >= len(devices):
                raise UsageError(
                    f"CUDA_VISIBLE_DEVICES is {visible}, and {self.local + 1} devices or more are to train."
                )
            see_devices(devices[self.local])
        else:
            see_devices(str(self.local))
        os.environ["TESSERA_WORLD_OF"] = str(os.getpid())  # train/distributed/world.py then waits for the others
        if self.rank == 0:
            yield list(options)
            return
        temporary = tempfile.mkdtemp(prefix=f"tessera-device-{os.getpid()}-")  # ComfyUI empties its temporary folder
        quiet = [] if "--verbose" in options else ["--verbose", "ERROR"]
        try:
            rank_options = [*options, "--database-url", "sqlite:///:memory:", "--temp-directory", temporary, *quiet]
            yield rank_options
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def without_device(self) -> UsageError:
        """Make the error for a process that finds no GPU."""
        return UsageError(
            "torch finds no GPU here; put -- --cpu at the end to run on the CPU."
            if self.size == 1
            else f"This machine has no GPU for its process {self.local + 1}; start as many processes as it has GPUs, "
            "or put -- --cpu at the end.",
            is_local=True,
        )

    def meet_others(self) -> None:
        """Wait for the other devices before any of them does work that takes long or may fail."""
        try:
            self.world()
        except TimeoutError as error:
            raise UsageError("Another device has not started for half an hour.", is_local=True) from error

    def world(self) -> Any:
        """Return the world of this device, once the pack is loaded; None if it trains alone."""
        current = _pack_module("train.distributed.world")
        return None if current is None or self.size == 1 else current.current_world()

    def check_shares(self, prompt: Prompt) -> None:
        """Raise UsageError if several devices can't share a step evenly, before upstream nodes encode and load."""
        share = _pack_module("train.distributed.share")
        if share is None or self.size == 1:
            return
        for node in prompt.values():
            if node["class_type"] != TRAIN:
                continue
            inputs = node.get("inputs", {})
            batch_size, accumulation = inputs.get("batch_size"), inputs.get("gradient_accumulation")
            if not isinstance(batch_size, int) or not isinstance(accumulation, int):
                continue  # connected
            try:
                share.shard_step(self.rank, self.size, batch_size, accumulation)
            except ValueError as error:
                raise UsageError(str(error)) from error

    def tell_others(self, text: str, seconds: float = 0.0) -> bool:
        """Send the other devices the reason why this one ends. Returns False if one has already done so.

        seconds: time that the first device has to do so first.
        """
        world = self.world()
        if world is None:
            return True
        with contextlib.suppress(RuntimeError):  # from the store, which may be gone
            if world.faults.first(seconds if self.rank else 0.0) is not None:
                return False
        world.abort(RuntimeError(text), text.partition("\n")[0])
        return True


def _pack_module(module: str) -> Any:
    """Return a module of the pack, whatever its folder is called; None if ComfyUI has not loaded it."""
    return next((sys.modules[name] for name in sys.modules if name.endswith(f".{module}")), None)


def check_many(prompt: Prompt, options: Sequence[str]) -> None:
    """Raise UsageError for a workflow or options that several devices can't run."""
    if not any(node["class_type"] == TRAIN for node in prompt.values()):
        raise UsageError(
            "The workflow has no Train LoRA, and nothing else is shared by several devices; leave --launch out."
        )
    for option in ("--cuda-device", "--default-device"):
        if any(argument.partition("=")[0] == option for argument in options):
            raise UsageError(
                f"{option} can't be used with several devices; let CUDA_VISIBLE_DEVICES name those to use."
            )

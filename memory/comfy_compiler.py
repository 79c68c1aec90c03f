"""Comfy Compiler, ComfyUI's recorder of the allocations of a model's forward: switch it off, one thread at a time.

It replays a recording at the same addresses, which compiled blocks, slots and tensors saved for a backward would break.
This module uses private parts of ComfyUI, as `common/core.py` does.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import comfy.cli_args

from ..common.core import COMFY_COMPILER


class _OfThread(threading.local):
    """Counter of a thread's calls inside `without_comfy_compiler`."""

    calls = 0

    def begin_call(self) -> None:
        self.calls += 1

    def end_call(self) -> None:
        self.calls -= 1


_held_off = _OfThread()


@lru_cache(maxsize=4)
def _switched(kind: type) -> type:
    """Derive a class of command line options whose disable switch is on for threads in `without_comfy_compiler`."""

    def read(args: Any) -> Any:
        if COMFY_COMPILER not in vars(args):
            raise AttributeError(COMFY_COMPILER)
        return True if _held_off.calls else vars(args)[COMFY_COMPILER]

    def write(args: Any, value: Any) -> None:
        vars(args)[COMFY_COMPILER] = value

    def remove(args: Any) -> None:
        del vars(args)[COMFY_COMPILER]

    return type(kind.__name__, (kind,), {COMFY_COMPILER: property(read, write, remove)})


@contextmanager
def without_comfy_compiler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Switch the recorder off for one call of the model on this thread, if this ComfyUI has it.

    It decides at the top of the model's forward, so this wraps `BaseModel.apply_model`. Other threads keep it.
    A recording left active on this thread by an earlier call, or started by this one in spite of the switch, is ended.

    args, kwargs: of `BaseModel.apply_model(x, t, c_concat, c_crossattn, control, transformer_options, **conds)`.
    """
    command_line: Any = comfy.cli_args.args
    if not hasattr(command_line, COMFY_COMPILER):
        yield
        return
    if COMFY_COMPILER not in vars(type(command_line)):
        kind: Any = type(command_line)
        command_line.__class__ = _switched(kind)
    options = args[5] if len(args) > 5 else kwargs.get("transformer_options", {})
    previous = options.get(COMFY_COMPILER)
    options[COMFY_COMPILER] = True
    _held_off.begin_call()
    _end_recording()
    try:
        yield
    finally:
        _end_recording()
        _held_off.end_call()
        if previous is None:
            options.pop(COMFY_COMPILER, None)
        else:
            options[COMFY_COMPILER] = previous


def _end_recording() -> None:
    """End this thread's active recording. A finished recording, which a later call replays, is kept."""
    prefetch: Any = sys.modules.get("comfy.model_prefetch")
    thread = threading.get_ident()
    graph = getattr(prefetch, "MALLOC_GRAPHS", {}).get(thread)
    if graph is not None and getattr(graph, "_comfy_active", False):
        prefetch.cleanup_malloc_graph()
    elif thread in getattr(prefetch, "ACTIVE_MALLOC_GRAPHS", {}):  # the first releases with the recorder
        prefetch.malloc_graph_end()

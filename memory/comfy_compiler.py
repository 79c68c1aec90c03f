"""Comfy Compiler: ComfyUI's recorder of what a model's forward allocates, held off one thread at a time.

It replays a recording at the same addresses, which compiled blocks, slots and tensors saved for a backward would break.
These are private touches of ComfyUI, as those in `common/core.py`.
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
    """Counter of a thread: calls that are inside `without_comfy_compiler`."""

    calls = 0


_held_off = _OfThread()


@lru_cache(maxsize=4)
def _switched(kind: type) -> type:
    """Derive a class of command line options whose switch is on for threads that hold the recorder off."""

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
    """Switch the recorder off for one call of the model on this thread, where this ComfyUI has it.

    It decides at the top of the model's forward, so this stands around `BaseModel.apply_model`. Other threads keep it.
    What an earlier call left recording on this thread, or this one does in spite of the switch, is ended.

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
    before = options.get(COMFY_COMPILER)
    options[COMFY_COMPILER] = True
    _held_off.calls += 1
    _end_recording()
    try:
        yield
    finally:
        _end_recording()
        _held_off.calls -= 1
        if before is None:
            options.pop(COMFY_COMPILER, None)
        else:
            options[COMFY_COMPILER] = before


def _end_recording() -> None:
    """End what records on this thread. A finished recording, which a later call replays, stays."""
    prefetch: Any = sys.modules.get("comfy.model_prefetch")
    thread = threading.get_ident()
    graph = getattr(prefetch, "MALLOC_GRAPHS", {}).get(thread)
    if graph is not None and getattr(graph, "_comfy_active", False):
        prefetch.cleanup_malloc_graph()
    elif thread in getattr(prefetch, "ACTIVE_MALLOC_GRAPHS", {}):  # of the first releases that had it
        prefetch.malloc_graph_end()

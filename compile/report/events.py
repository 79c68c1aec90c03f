"""Compile events: the work of torch.compile during one call of a compiled callable.

    with recording("run_flux_double") as record:
        out = compiled(block, *args)
    if record.event is not None:  # something was compiled, or tried
        events.append(record.event)

A call that compiles nothing costs about a microsecond. Torch stores none of this per region for good (its list of
compilations holds 64 and knows no region), so a hook of ours is called as each compilation begins, on the thread that
compiles, and assigns the entries that torch has written since to the recording that was open there.

If a torch lacks one of the names in `torch_private`, its part of the event is None; nothing fails.
"""

import logging
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from torch._dynamo import utils as dynamo

from .graph_breaks import Break, break_places, message, plain_function
from .guards import distance, failed_guards
from .torch_private import COMPILE_LOCALS, missing

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recompile:
    """Reason why no existing graph fitted.

    function: name of the recompiled function.
    graphs: number of existing graphs.
    guards: all that failed in the nearest graph, in torch's wording (`explain.advice` gives the remedy).
    """

    function: str
    graphs: int
    guards: tuple[str, ...]


@dataclass(frozen=True)
class CompileEvent:
    """Compilations of one recorded call. A value is None if the installed torch does not report it.

    region: label of the recorded region.
    graphs: made by dynamo, from a cache or not.
    seconds: total compile time.
    tracing_seconds: the part of it that no cache saves (dynamo and guards).
    fx_hits: graphs that inductor's cache had.
    fx_misses: graphs that inductor's cache lacked.
    aot_hits: graphs that AOTAutograd's cache had.
    aot_misses: graphs that AOTAutograd's cache lacked.
    bypassed: compilations that could not be cached.
    breaks: graph breaks, each place once.
    recompiles: recompilations with the guards that failed.
    dynamic: whether any graph has symbolic sizes.
    limit_reached: the limit of graphs was reached, and calls that did not fit run uncompiled.
    error: torch's message if a compilation failed other than by a graph break.
    """

    region: str
    graphs: int
    seconds: float | None
    tracing_seconds: float | None
    fx_hits: int | None
    fx_misses: int | None
    aot_hits: int | None
    aot_misses: int | None
    bypassed: int | None
    breaks: tuple[Break, ...] | None
    recompiles: tuple[Recompile, ...] | None
    dynamic: bool
    limit_reached: bool
    error: str | None


class recording:
    """Context manager that records the compilations inside it, on this thread, as those of `region`, in `event`.

    It may be nested (each compilation belongs to the innermost) and may enclose a backward. An exception keeps the
    event. It encloses every block of every step, so without a compilation it calls no other function of ours.

    events: the list that the event is appended to, if any.
    """

    __slots__ = ("region", "events", "event", "batch", "recompiles")

    def __init__(self, region: str, events: list[CompileEvent] | None = None) -> None:
        self.region, self.events = region, events
        self.event: CompileEvent | None = None
        self.batch: _Batch | None = None
        self.recompiles: list[Recompile] = []

    def __enter__(self) -> "recording":
        hooks = getattr(dynamo, "_recompile_user_contexts", None)
        if hooks is None or _on_compile not in hooks:
            _listen()
        metrics = getattr(dynamo, "_compilation_metrics", None)
        if (metrics[-1] if metrics else None) is not _ledger.newest:
            _ledger.settle(None)
        _open.stack.append(self)
        return self

    def take(self, batch: "_Batch") -> None:
        """Record torch's entries as those of this recording."""
        self.batch = batch

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _open.stack.pop()
        metrics = getattr(dynamo, "_compilation_metrics", None)
        newest = metrics[-1] if metrics else None
        if self.batch is None and newest is _ledger.newest and _ledger.owner is not self:
            return
        _ledger.close(self)
        if self.batch is not None:
            self.event = _event(self.region, self.batch, self.recompiles)
            if self.events is not None:
                self.events.append(self.event)


class _Batch:
    """Entries that torch has written since the last `settle`."""

    def __init__(self) -> None:
        self.metrics: list[Any] = []
        self.breaks: list[Any] = []
        self.bypassed = 0
        self.abandoned = 0

    def add(self, metrics: Sequence[Any], breaks: Sequence[Any], bypassed: int, abandoned: int) -> None:
        self.metrics += metrics
        self.breaks += breaks
        self.bypassed += max(0, bypassed)
        self.abandoned += max(0, abandoned)


class _Ledger:
    """Record of the owner of torch's next entries. Dynamo compiles one frame at a time, under its own lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant: methods call each other; autograd compiles on its own threads
        self.owner: recording | None = None
        self.newest: Any = None
        self.newest_break: Any = None
        self.counted = (0, 0)

    def settle(self, default: recording | None) -> None:
        """Assign new entries to the recording whose compilation began last, else to `default`."""
        with self.lock:
            target = self.owner or default
            batch = (target.batch if target else None) or _Batch()
            metrics = _entries_after(getattr(dynamo, "_compilation_metrics", ()), self.newest)
            breaks = _entries_after(getattr(dynamo, "graph_break_reasons", ()), self.newest_break)
            self.newest = _newest()
            self.newest_break = next(reversed(getattr(dynamo, "graph_break_reasons", ())), None)
            previous, self.counted = self.counted, _counted()
            bypassed, abandoned = (count - earlier for count, earlier in zip(self.counted, previous, strict=True))
            batch.add(metrics, breaks, bypassed, abandoned)
            if target is not None and (batch.metrics or batch.breaks):
                target.take(batch)

    def begin(self, owner: recording | None) -> None:
        with self.lock:
            self.settle(None)
            self.owner = owner

    def close(self, closing: recording) -> None:
        with self.lock:
            # A backward is compiled lazily on a thread of autograd, without a call of the hook.
            self.settle(closing)
            if self.owner is closing:
                self.owner = None


class _Open(threading.local):
    def __init__(self) -> None:
        self.stack: list[recording] = []


_ledger = _Ledger()
_open = _Open()


def _entries_after(entries: Sequence[Any], last: Any) -> list[Any]:
    """Return the entries after `last`.

    All of them if it is gone: torch drops old entries, and all at a reset.
    """
    newer: list[Any] = []
    for entry in reversed(list(entries)):  # a copy, since a backward appends entries from another thread
        if entry is last:
            break
        newer.insert(0, entry)
    return newer


def _newest() -> Any:
    metrics = getattr(dynamo, "_compilation_metrics", None)
    return metrics[-1] if metrics else None


def _counted() -> tuple[int, int]:
    """Count since process start: compilations that could not be cached, and those that dynamo abandoned to trace again.

    The latter happens if a number turns out to be constant in the graph. Each is a miss of AOTAutograd's cache in every
    process, since it produces nothing to cache.
    """
    counters: Any = getattr(dynamo, "counters", {})
    inductor, aot = (counters.get(group, {}) for group in ("inductor", "aot_autograd"))
    bypassed = inductor.get("fxgraph_cache_bypass", 0) + aot.get("autograd_cache_bypass", 0)
    return bypassed, aot.get("total", 0) - aot.get("ok", 0) - aot.get("not_ok", 0)


def _listen() -> None:
    """Register a hook for the start of each compilation; it adds only the region's name to torch's record."""
    register = getattr(dynamo, "register_hook_for_recompile_user_context", None)
    if register is not None:
        hooks = dynamo.get_hook_for_recompile_user_context()
        if hooks is None or _on_compile not in hooks:
            register(_on_compile)


def _on_compile() -> str:
    try:
        owner = _open.stack[-1] if _open.stack else None
        _ledger.begin(owner)
        if owner is None:
            return ""
        recompile = _recompile(sys._getframe(1))
        if recompile is not None:
            owner.recompiles.append(recompile)
        return owner.region
    except Exception:  # an error here would abort the user's compilation
        logger.debug("a compilation could not be recorded", exc_info=True)
        return ""


def _recompile(frame: FrameType | None) -> Recompile | None:
    """Return the failed guards if the frame that dynamo is about to compile has graphs already."""
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_globals.get("__name__") == "torch._dynamo.convert_frame":
            break
        frame = frame.f_back
    else:
        return None
    entries, compiling = (frame.f_locals.get(name) for name in COMPILE_LOCALS)
    if not entries or compiling is None:
        return None
    failed = [failed_guards(entry.guard_manager, compiling.f_locals) for entry in entries]
    nearest = min(failed, key=distance)
    return Recompile(plain_function(compiling.f_code.co_name), len(entries), nearest)


class _Compilations:
    """Torch's entries on compilations, by their outcome.

    frames: those of a function; a backward has none: it is compiled from a graph that its forward left.
    compiled: frames with a graph.
    over_limit: refused at the limit, where dynamo stops before it has a frame.
    broken: frames with a graph break.
    errors: the other failures.
    """

    def __init__(self, metrics: Sequence[Any]) -> None:
        self.frames = [m for m in metrics if getattr(m, "co_name", None)]
        self.compiled = [m for m in self.frames if _has_graph(m)]
        failed = [m for m in metrics if getattr(m, "fail_type", None)]
        self.over_limit = [m for m in failed if _is_over_limit(m)]
        self.broken = [m for m in failed if m in self.frames and m.fail_type in ("Unsupported", "UserError")]
        rest = [m for m in failed if m not in self.over_limit and m not in self.broken]
        # SkipFrame: a function without a torch op, so nothing is lost.
        self.errors = [m for m in rest if m.fail_type != "SkipFrame"]


def _has_graph(metrics: Any) -> bool:
    return bool(getattr(metrics, "has_guarded_code", None) and getattr(metrics, "graph_op_count", 0))


def _is_over_limit(metrics: Any) -> bool:
    return metrics.fail_type in _OVER_LIMIT or _OVER_LIMIT[0] in str(metrics.fail_reason)


def _tracing_seconds(metrics: Sequence[Any], frames: Sequence[Any]) -> float | None:
    """Return the seconds of dynamo itself: all without those of backwards and of the backend."""
    total = _total(metrics, "duration_us")
    backend = _total(metrics, "aot_autograd_cumulative_compile_time_us")
    if total is None or backend is None:
        return None
    backwards = sum(m.duration_us or 0 for m in metrics if m not in frames)
    return max(0, total - backwards - backend) / 1e6


def _event(region: str, batch: _Batch, recompiles: list[Recompile]) -> CompileEvent:
    metrics = batch.metrics
    compilations = _Compilations(metrics)
    microseconds = _total(metrics, "duration_us")
    aot_misses = _total(metrics, "aotautograd_local_cache_miss_count")
    breaks = break_places(batch.breaks, compilations.broken)
    errors = compilations.errors
    return CompileEvent(
        region=region,
        graphs=len(compilations.compiled),
        seconds=None if microseconds is None else microseconds / 1e6,
        tracing_seconds=_tracing_seconds(metrics, compilations.frames),
        fx_hits=_total(metrics, "inductor_fx_local_cache_hit_count"),
        fx_misses=_total(metrics, "inductor_fx_local_cache_miss_count"),
        aot_hits=_total(metrics, "aotautograd_local_cache_hit_count"),
        aot_misses=None if aot_misses is None else max(0, aot_misses - batch.abandoned),
        bypassed=batch.bypassed if hasattr(dynamo, "counters") else None,
        breaks=breaks if hasattr(dynamo, "graph_break_reasons") else None,
        recompiles=tuple(recompiles) if hasattr(dynamo, "register_hook_for_recompile_user_context") else None,
        dynamic=any(_is_symbolic(str(getattr(m, "graph_node_shapes", ""))) for m in compilations.compiled),
        limit_reached=bool(compilations.over_limit),
        error=message(errors[0].fail_reason) if errors else None,
    )


_OVER_LIMIT = ("Dynamo recompile limit exceeded", "FailOnRecompileLimitHit", "RecompileLimitExceeded")
_SYMBOL = re.compile(r"\b[su]\d+\b")


def _is_symbolic(shapes: str) -> bool:
    """Return whether a list of a graph's shapes, each in brackets, has a symbolic size such as s27."""
    return any(_SYMBOL.search(shape.partition("]")[0]) for shape in shapes.split("[")[1:])


def _total(metrics: Sequence[Any], name: str) -> int | None:
    if missing(f"torch._dynamo.utils:CompilationMetrics.{name}"):
        return None
    return sum(getattr(m, name, None) or 0 for m in metrics)

"""Compile events: the work of torch.compile during one call of a compiled callable.

    with recording("run_flux_double") as record:
        out = compiled(block, *args)
    if record.event is not None:  # something was compiled, or tried
        events.append(record.event)

A call that compiles nothing costs about a microsecond. Torch keeps nothing of this per region for good (its list of
compilations holds 64 and knows no region), so a listener of ours is called as each compilation begins, on the thread
that compiles, and hands what torch has written since to the recording that was open there.

Where a torch lacks one of the names in `torch_private`, its part of the event is None; nothing fails.
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
    """Reason why the graphs at hand did not fit.

    function: name of the function that was compiled again.
    graphs: number of graphs at hand.
    guards: all that failed in the nearest of them (`explain.advice` gives the remedy), with torch's wording.
    """

    function: str
    graphs: int
    guards: tuple[str, ...]


@dataclass(frozen=True)
class CompileEvent:
    """Compilations of one recorded call. None where the installed torch does not report a value.

    seconds: all of compiling.
    tracing_seconds: the part of it that no cache saves (dynamo and guards).
    graphs: made by dynamo, from a cache or not.
    bypassed: compilations that no cache could hold.
    dynamic: a graph with symbolic sizes was among them.
    limit_reached: the limit of graphs was met, and calls that did not fit run uncompiled.
    error: torch's message where a compilation failed otherwise than by a graph break.
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
    """Record the compilations of the calls inside it, on this thread, as those of `region`; see `event` after it.

    It may be nested (each compilation belongs to the innermost) and be around a backward. Leaving by an error keeps
    the event. It stands around every block of every step, so what compiles nothing calls nothing.

    events: the list that the event is added to, if any.
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
    """Entries that torch has written since the last time it was asked."""

    def __init__(self) -> None:
        self.metrics: list[Any] = []
        self.breaks: list[Any] = []
        self.bypassed = 0
        self.abandoned = 0


class _Ledger:
    """Owner of torch's next entries. Dynamo compiles one frame at a time, under a lock of its own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # autograd compiles backwards on threads of its own; one method calls another
        self.owner: recording | None = None
        self.newest: Any = None
        self.newest_break: Any = None
        self.counted = (0, 0)

    def settle(self, default: recording | None) -> None:
        """Hand new entries to the recording whose compilation was last begun, else to `default`."""
        with self.lock:
            to = self.owner or default
            batch = (to.batch if to else None) or _Batch()
            batch.metrics += _after(getattr(dynamo, "_compilation_metrics", ()), self.newest)
            batch.breaks += _after(getattr(dynamo, "graph_break_reasons", ()), self.newest_break)
            self.newest = _newest()
            self.newest_break = next(reversed(getattr(dynamo, "graph_break_reasons", ())), None)
            before, self.counted = self.counted, _counted()
            batch.bypassed += max(0, self.counted[0] - before[0])
            batch.abandoned += max(0, self.counted[1] - before[1])
            if to is not None and (batch.metrics or batch.breaks):
                to.batch = batch

    def begin(self, owner: recording | None) -> None:
        with self.lock:
            self.settle(None)
            self.owner = owner

    def close(self, closing: recording) -> None:
        with self.lock:
            # A backward is compiled late and on a thread of autograd, with no word to the listener.
            self.settle(closing)
            if self.owner is closing:
                self.owner = None


class _Open(threading.local):
    def __init__(self) -> None:
        self.stack: list[recording] = []


_ledger = _Ledger()
_open = _Open()


def _after(entries: Sequence[Any], last: Any) -> list[Any]:
    """Return the entries after `last`.

    All, where it is not there any more: torch drops old entries, and all at a reset.
    """
    found: list[Any] = []
    for entry in reversed(list(entries)):  # a copy: a backward adds entries from a thread of its own
        if entry is last:
            break
        found.insert(0, entry)
    return found


def _newest() -> Any:
    metrics = getattr(dynamo, "_compilation_metrics", None)
    return metrics[-1] if metrics else None


def _counted() -> tuple[int, int]:
    """Since the process began: compilations that no cache can hold, and those that dynamo gave up to trace anew.

    The latter happens where a number turns out to be fixed in the graph. Each is a miss of AOTAutograd's cache in
    every process, since nothing is made that could be kept.
    """
    counters: Any = getattr(dynamo, "counters", {})
    inductor, aot = (counters.get(group, {}) for group in ("inductor", "aot_autograd"))
    bypassed = inductor.get("fxgraph_cache_bypass", 0) + aot.get("autograd_cache_bypass", 0)
    return bypassed, aot.get("total", 0) - aot.get("ok", 0) - aot.get("not_ok", 0)


def _listen() -> None:
    """Has dynamo call us as each compilation begins. The hook adds nothing but the region's name to torch's record."""
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
    except Exception:  # an error here would end the user's compilation
        logger.debug("a compilation could not be recorded", exc_info=True)
        return ""


def _recompile(frame: FrameType | None) -> Recompile | None:
    """The guards that failed, where the frame that dynamo is about to compile has graphs already."""
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


def _event(region: str, batch: _Batch, recompiles: list[Recompile]) -> CompileEvent:
    metrics = batch.metrics
    # A backward has no frame of its own, and no tracing: it is compiled from a graph that its forward left.
    frames = [each for each in metrics if getattr(each, "co_name", None)]
    made = [each for each in frames if getattr(each, "has_guarded_code", None) and getattr(each, "graph_op_count", 0)]
    failed = [each for each in metrics if getattr(each, "fail_type", None)]
    # Over the limit dynamo stops before it has a frame.
    over_limit = [each for each in failed if each.fail_type in _OVER_LIMIT or _OVER_LIMIT[0] in str(each.fail_reason)]
    broken = [each for each in failed if each in frames and each.fail_type in ("Unsupported", "UserError")]
    # SkipFrame: a function without one operation of torch, which loses nothing.
    errors = [each for each in failed if each not in (*over_limit, *broken) and each.fail_type != "SkipFrame"]
    seconds, backend = (_total(metrics, name) for name in ("duration_us", "aot_autograd_cumulative_compile_time_us"))
    late = sum(each.duration_us or 0 for each in metrics if each not in frames) if seconds is not None else 0
    aot_misses = _total(metrics, "aotautograd_local_cache_miss_count")
    return CompileEvent(
        region=region,
        graphs=len(made),
        seconds=None if seconds is None else seconds / 1e6,
        tracing_seconds=None if seconds is None or backend is None else max(0, seconds - late - backend) / 1e6,
        fx_hits=_total(metrics, "inductor_fx_local_cache_hit_count"),
        fx_misses=_total(metrics, "inductor_fx_local_cache_miss_count"),
        aot_hits=_total(metrics, "aotautograd_local_cache_hit_count"),
        aot_misses=None if aot_misses is None else max(0, aot_misses - batch.abandoned),
        bypassed=batch.bypassed if hasattr(dynamo, "counters") else None,
        breaks=break_places(batch.breaks, broken) if hasattr(dynamo, "graph_break_reasons") else None,
        recompiles=tuple(recompiles) if hasattr(dynamo, "register_hook_for_recompile_user_context") else None,
        dynamic=any(_is_symbolic(str(getattr(each, "graph_node_shapes", ""))) for each in made),
        limit_reached=bool(over_limit),
        error=message(errors[0].fail_reason) if errors else None,
    )


_OVER_LIMIT = ("Dynamo recompile limit exceeded", "FailOnRecompileLimitHit", "RecompileLimitExceeded")
_SYMBOL = re.compile(r"\b[su]\d+\b")


def _is_symbolic(shapes: str) -> bool:
    """Test for a size like s27 in the list of a graph's shapes, each of which stands in brackets."""
    return any(_SYMBOL.search(shape.partition("]")[0]) for shape in shapes.split("[")[1:])


def _total(metrics: Sequence[Any], name: str) -> int | None:
    if missing(f"torch._dynamo.utils:CompilationMetrics.{name}"):
        return None
    return sum(getattr(each, name, None) or 0 for each in metrics)

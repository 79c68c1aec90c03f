"""What torch.compile did during one call of a compiled callable.

    with recording("run_flux_double") as record:
        out = compiled(block, *args)
    if record.event is not None:  # something was compiled, or tried
        events.append(record.event)

A call that compiles nothing costs about a microsecond. Torch keeps nothing of this per region for good (its list of
compilations holds 64 and knows no region), so a listener of ours is told of each compilation as it begins, on the
thread that compiles, and hands what torch has written since to the recording that was open there.

The private names of torch that reporting needs are in this file and no other. Where a torch lacks one, what it would
have told is None in the event and `untold` says so; nothing fails.
"""

import importlib
import linecache
import logging
import re
import sys
import sysconfig
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch._dynamo import utils as dynamo

from .guard_text import differences, distance, tidy

logger = logging.getLogger(__name__)

TESTED_TORCH = ("2.14",)

# What is unknown where a name is missing, and the names: "module:attribute", dotted.
PRIVATE_NAMES: dict[str, tuple[str, ...]] = {
    "graphs and compile seconds": (
        "torch._dynamo.utils:_compilation_metrics",
        "torch._dynamo.utils:CompilationMetrics.compile_id",
        "torch._dynamo.utils:CompilationMetrics.co_name",
        "torch._dynamo.utils:CompilationMetrics.co_filename",
        "torch._dynamo.utils:CompilationMetrics.co_firstlineno",
        "torch._dynamo.utils:CompilationMetrics.duration_us",
        "torch._dynamo.utils:CompilationMetrics.aot_autograd_cumulative_compile_time_us",
        "torch._dynamo.utils:CompilationMetrics.has_guarded_code",
        "torch._dynamo.utils:CompilationMetrics.graph_op_count",
        "torch._dynamo.utils:CompilationMetrics.graph_node_shapes",
        "torch._dynamo.utils:CompilationMetrics.fail_type",
        "torch._dynamo.utils:CompilationMetrics.fail_reason",
        "torch._dynamo.utils:CompilationMetrics.fail_user_frame_filename",
        "torch._dynamo.utils:CompilationMetrics.fail_user_frame_lineno",
    ),
    "cache hits": (
        "torch._dynamo.utils:CompilationMetrics.inductor_fx_local_cache_hit_count",
        "torch._dynamo.utils:CompilationMetrics.inductor_fx_local_cache_miss_count",
        "torch._dynamo.utils:CompilationMetrics.aotautograd_local_cache_hit_count",
        "torch._dynamo.utils:CompilationMetrics.aotautograd_local_cache_miss_count",
        "torch._dynamo.utils:counters",
    ),
    "graph breaks": ("torch._dynamo.utils:graph_break_reasons", "torch._dynamo.output_graph:GraphCompileReason"),
    "the guard that failed": (
        "torch._dynamo.utils:register_hook_for_recompile_user_context",
        "torch._dynamo.utils:get_hook_for_recompile_user_context",
        "torch._dynamo.convert_frame:_compile",
        "torch._dynamo.guards:GuardManagerWrapper.check_verbose",
        "torch._C._dynamo.guards:RootGuardManager.get_epilogue_lambda_guards",
        "torch._C._dynamo.guards:GuardManager.get_leaf_guards",
        "torch._C._dynamo.guards:GuardManager.get_child_managers",
        "torch._C._dynamo.guards:GuardManager.get_source",
        "torch._C._dynamo.guards:DictGuardManager.get_key_value_managers",
        "torch._C._dynamo.guards:LeafGuard.verbose_code_parts",
    ),
}
# Locals of torch._dynamo.convert_frame._compile.
COMPILE_LOCALS = ("cache_entries_for_reasons", "frame")


def missing(name: str) -> bool:
    """Whether the installed torch lacks one of the PRIVATE_NAMES."""
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
        first, _, rest = attribute.partition(".")
        holder = getattr(found, first)
        # A field without a default is no attribute of its dataclass.
        return bool(rest) and rest not in getattr(holder, "__dataclass_fields__", ()) and not hasattr(holder, rest)
    except (ImportError, AttributeError):
        return True


def untold() -> tuple[str, ...]:
    """What this torch does not tell, a sentence each; empty on a torch that has all the names."""
    lacking = (what for what, names in PRIVATE_NAMES.items() if any(map(missing, names)))
    return tuple(f"This torch ({torch.__version__}) does not tell {what}." for what in lacking)


@dataclass(frozen=True)
class Break:
    """A place where a graph ended early. Equal for the same place and message: a set of them has each once.

    cause: torch's short name of the kind; detail: torch's message, which `explain.plain_words` turns into plain
    words; skipped: no graph was made around it, all of `function` runs uncompiled.
    """

    file: str
    line: int
    source: str
    function: str
    cause: str
    detail: str = field(repr=False)
    skipped: bool = False


@dataclass(frozen=True)
class Recompile:
    """Why the graphs at hand did not fit. function: what was compiled again; graphs: how many were at hand; guards: all
    that failed in the nearest of them (`explain.advice` says what to change), with torch's wording."""

    function: str
    graphs: int
    guards: tuple[str, ...]


@dataclass(frozen=True)
class CompileEvent:
    """What one recorded call compiled. None where the installed torch does not tell.

    seconds: all of compiling; tracing_seconds: the part of it that no cache saves (dynamo and guards); graphs: made
    by dynamo, from a cache or not; bypassed: compilations that no cache could hold; dynamic: a graph with symbolic
    sizes was among them; limit_reached: the limit of graphs was met, and what did not fit runs uncompiled; error:
    torch's message where a compilation failed otherwise than by a graph break.
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
    """Records the compilations of the calls inside it, on this thread, as those of `region`; see `event` after it.

    It may be nested (each compilation belongs to the innermost) and be around a backward. Leaving by an error keeps
    the event.
    """

    __slots__ = ("region", "event", "batch", "recompiles")

    def __init__(self, region: str) -> None:
        self.region = region
        self.event: CompileEvent | None = None
        self.batch: _Batch | None = None
        self.recompiles: list[Recompile] = []

    def __enter__(self) -> "recording":
        _listen()
        if _newest() is not _ledger.newest:
            _ledger.settle(None)
        _open.stack.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _open.stack.pop()
        if self.batch is None and _newest() is _ledger.newest and _ledger.owner is not self:
            return
        _ledger.close(self)
        if self.batch is not None:
            self.event = _event(self.region, self.batch, self.recompiles)


class _Batch:
    """What torch has written since the last time it was asked."""

    def __init__(self) -> None:
        self.metrics: list[Any] = []
        self.breaks: list[Any] = []
        self.bypassed = 0
        self.abandoned = 0


class _Ledger:
    """Which recording torch's next entries belong to. Dynamo compiles one frame at a time, under a lock of its own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.owner: recording | None = None
        self.newest: Any = None
        self.newest_break: Any = None
        self.counted = (0, 0)

    def settle(self, default: recording | None) -> None:
        """Hands what is new to the recording whose compilation was last begun, else to `default`."""
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
    """What came after `last`: all, where it is not there any more (torch forgets old entries, and all at a reset)."""
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
    failed = [_failed_guards(entry.guard_manager, compiling.f_locals) for entry in entries]
    nearest = min(failed, key=distance)
    return Recompile(_plain_function(compiling.f_code.co_name), len(entries), nearest)


# Guards over several values at once: asking one by itself would leave it half asked.
_RELATIONAL = {"OBJECT_ALIASING", "NO_TENSOR_ALIASING", "STORAGE_OVERLAPPING"}


def _failed_guards(manager: Any, values: dict[str, Any]) -> tuple[str, ...]:
    """All guards of one graph that do not hold for the locals `values`.

    Torch names the first that fails and stops, in an order that moves with each failure, so a graph cannot be told to
    be near or far from it. The tree of guards is asked value by value here; torch's own answer is kept beside.
    """
    if not hasattr(manager, "root") or manager.root is None or hasattr(manager, "invalidation_reason"):
        return (str(getattr(manager, "invalidation_reason", "the graph was made invalid")).strip(),)
    info = manager.check_verbose(values)
    own = [] if info.result or len(info.verbose_code_parts) != 1 else [tidy(info.verbose_code_parts[0])]
    found: list[str] = []
    try:
        found = list(dict.fromkeys(_walk(manager, values)))
    except Exception:
        logger.debug("the guards could not be asked one by one", exc_info=True)
    manager.check_verbose(values)  # leaves the relational guards as a whole check does
    if own and own[0].startswith("GLOBAL_STATE"):
        # Another grad mode gives every tensor other dispatch keys.
        found = [guard for guard in found if "dispatch key" not in guard]
    # Of a tensor torch tells the first difference only, and found has them all.
    same = [re.match(r"tensor '.*' (?=[a-z_ ]+ mismatch)|.*", text) for text in own]
    texts = [each.string for each in same if each and not any(text.startswith(each.group()) for text in found)] + found
    return tuple(texts) or ("no guard fails any more",)


def _walk(manager: Any, values: dict[str, Any]) -> Iterable[str]:
    scope = {"L": values, "G": manager.global_scope["G"], **manager.closure_vars}
    for leaf in (*manager.root.get_leaf_guards(), *manager.root.get_epilogue_lambda_guards()):
        if type(leaf).__name__ == "LAMBDA_GUARD" and leaf(values) is False:
            yield from (tidy(part) for part in leaf.verbose_code_parts() if _false(part, manager.global_scope, scope))
    pending = list(manager.root.get_child_managers())
    while pending:
        child = pending.pop(0)
        try:
            value = eval(child.get_source(), dict(manager.global_scope), scope)
        except Exception:  # the value is gone: a guard further up says so
            continue
        failing = [
            leaf for leaf in child.get_leaf_guards() if type(leaf).__name__ not in _RELATIONAL and leaf(value) is False
        ]
        for leaf in failing:
            yield from differences(type(leaf).__name__, leaf.verbose_code_parts(), value)
        if any(type(leaf).__name__ == "TYPE_MATCH" for leaf in failing):
            continue  # what another class holds says nothing
        pending += child.get_child_managers()
        for pair in getattr(child, "get_key_value_managers", dict)().values():
            pending += [each for each in pair if each is not None]


def _false(part: str, names: dict[str, Any], scope: dict[str, Any]) -> bool:
    """One of the conditions that a shape guard is made of; those that cannot be asked alone count as failed."""
    try:
        return not eval(part, dict(names), scope)
    except Exception:
        return True


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
        breaks=_places(batch.breaks, broken) if hasattr(dynamo, "graph_break_reasons") else None,
        recompiles=tuple(recompiles) if hasattr(dynamo, "register_hook_for_recompile_user_context") else None,
        dynamic=any(_SYMBOLIC.search(str(getattr(each, "graph_node_shapes", ""))) for each in made),
        limit_reached=bool(over_limit),
        error=_message(errors[0].fail_reason) if errors else None,
    )


_OVER_LIMIT = ("Dynamo recompile limit exceeded", "FailOnRecompileLimitHit", "RecompileLimitExceeded")
# A size like s27 in the list of a graph's shapes.
_SYMBOLIC = re.compile(r"\[[^\]]*\b[su]\d+\b[^\]]*\]")


def _total(metrics: Sequence[Any], name: str) -> int | None:
    if missing(f"torch._dynamo.utils:CompilationMetrics.{name}"):
        return None
    return sum(getattr(each, name, None) or 0 for each in metrics)


def _places(reasons: Sequence[Any], broken: Sequence[Any]) -> tuple[Break, ...]:
    """Each place once, although torch notes it for every function around it and again where it gives up."""
    breaks: dict[tuple[str, int, str], Break] = {}
    for each in (*map(_break, reasons), *map(_skipped, broken)):
        breaks[each.file, each.line, each.detail.partition("\n  Hint")[0]] = each
    return tuple(breaks.values())


def _break(reason: Any) -> Break:
    """From an entry of torch's list of breaks. A branch on a tensor's value is noted there by its bytecode alone."""
    stack = list(reason.user_stack)
    place = next((frame for frame in reversed(stack) if _is_users(frame.filename)), stack[-1] if stack else None)
    detail = _message(reason.reason)
    if detail.startswith("generic_jump"):
        detail = f"Data-dependent branching\n  Developer debug context: {detail}"
    if place is None:
        return Break("", 0, "", "", _first_line(detail), detail)
    line = place.line or linecache.getline(place.filename, place.lineno or 0)
    name = _plain_function(place.name)
    return Break(place.filename, place.lineno or 0, (line or "").strip(), name, _first_line(detail), detail)


def _skipped(metrics: Any) -> Break:
    """Of a function that dynamo gave up: its own place where the breaking line is in the standard library or torch."""
    file, line = metrics.fail_user_frame_filename or "", metrics.fail_user_frame_lineno or 0
    detail = _message(metrics.fail_reason)
    if not _is_users(file):
        detail += f"\n  In: {file}:{line}"
        file, line = metrics.co_filename or "", metrics.co_firstlineno or 0
    source = linecache.getline(file, line).strip()
    return Break(file, line, source, _plain_function(metrics.co_name), _first_line(detail), detail, skipped=True)


_TORCH = str(Path(torch.__file__).parent)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def _is_users(file: str) -> bool:
    # site-packages lie inside the standard library's folder.
    library = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return bool(file) and not library and not file.startswith(_TORCH)


def _message(text: Any) -> str:
    """Without the addresses of objects, which differ from time to time."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(text)).strip()


def _first_line(text: str) -> str:
    return str(text).strip().partition("\n")[0].strip()


def _plain_function(name: str | None) -> str:
    """The function a user knows, of one that dynamo made to go on after a break."""
    resumed = re.match(r"torch_dynamo_resume_in_(\w+)_at_\d+", name or "")
    return resumed.group(1) if resumed else name or ""

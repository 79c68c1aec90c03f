"""How a region is compiled."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from .regions import run_block


@dataclass(frozen=True)
class CompileSettings:
    """backend and mode as `torch.compile` takes them. Training is always static in shape and whole (fullgraph)."""

    backend: str = "inductor"
    mode: str = "default"


def compile_region(name: str, settings: CompileSettings, graphs: int) -> Callable[..., Any]:
    """A compiled `run_block` of its own, which may hold up to `graphs` graphs and raises beyond that.

    The limit belongs to this one region: nothing process-wide is written, and regions do not share entries. A torch
    without those arguments has the limit in its configuration, which is changed for the time of each call.
    """
    # A copy of the code object under its own name: dynamo keeps its entries, and names its reports, by code object.
    body = FunctionType(run_block.__code__.replace(co_name=f"run_{name}"), run_block.__globals__, f"run_{name}")
    supported = inspect.signature(torch.compile).parameters
    limits = {"recompile_limit": graphs, "isolate_recompiles": True}
    extra: dict[str, Any] = {k: v for k, v in limits.items() if k in supported}
    if settings.mode != "default" and settings.backend == "inductor":
        extra["mode"] = settings.mode
    compiled = torch.compile(body, backend=settings.backend, fullgraph=True, dynamic=False, **extra)
    return compiled if "recompile_limit" in supported else _within_limit(compiled, graphs)


def _within_limit(compiled: Callable[..., Any], graphs: int) -> Callable[..., Any]:
    from torch._dynamo import config

    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    limit = max(graphs, getattr(config, name))

    def run(*args: Any) -> Any:
        with config.patch({name: limit}):
            return compiled(*args)

    return run


def cannot_compile(error: BaseException) -> str | None:
    """One line of cause where `error` comes from compiling (no compiler, no Triton, an op that does not trace), else
    None. Reaching the limit of graphs is not such a case: see `over_the_limit`."""
    from torch._dynamo.exc import TorchDynamoException

    seen: BaseException | None = error
    while seen is not None:
        if over_the_limit(seen):
            return None
        if isinstance(seen, TorchDynamoException) or type(seen).__module__.startswith("torch._inductor"):
            lines = str(seen).strip().splitlines() or [type(seen).__name__]
            return lines[0][:300]
        seen = seen.__cause__
    return None


def over_the_limit(error: BaseException) -> bool:
    """True where dynamo gave up because a region met more shapes than were planned."""
    return type(error).__name__ in ("FailOnRecompileLimitHit", "RecompileLimitExceeded", "CacheLimitExceeded")

"""Compiled regions: one callable each, shared by all blocks of one structure.

A region is called with the block as an argument, so the number of graphs does not grow with depth.
"""

import inspect
import itertools
import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import FunctionType
from typing import Any

import comfy.model_management
import torch

from ..memory.swap.oom_retry import copy_containers
from ..models.adapters import add_product
from ..models.family import Block
from .compile_report import RegionReport, format_break
from .cuda_graphs import from_cuda_graphs
from .report import timing
from .report.events import CompileEvent
from .report.explain import explain_break
from .settings import DYNAMIC, CompileOptions

log = logging.getLogger(__name__)

Notify = Callable[[str], None]


class TooManyGraphs(RuntimeError):
    """Raised if a region exceeds its limit of graphs, on a torch without a limit for one callable."""


def limits_each_region() -> bool:
    """Return whether torch.compile takes a limit for one callable; without it, graphs are counted afterwards."""
    return "recompile_limit" in inspect.signature(torch.compile).parameters


class CompileFailed(RuntimeError):
    """Raised if a region can't be compiled as its settings require; the message is for the user."""


def compiled_function(body: Callable[..., Any], name: str, options: CompileOptions) -> Callable[..., Any]:
    """Compile `body` on its own under `name`, with up to `options.limit` graphs.

    The limit is per callable: no process-wide setting is written, and callables do not share cache entries. A torch
    without those arguments has the limit in its configuration, which is patched during each call.
    """
    # A copy of the code object under its own name: dynamo keys its cache entries and its reports by code object.
    assert isinstance(body, FunctionType)
    named_body = FunctionType(body.__code__.replace(co_name=name), body.__globals__, name)
    supported = inspect.signature(torch.compile).parameters
    limits = {"recompile_limit": options.limit, "isolate_recompiles": True}
    extra: dict[str, Any] = {k: v for k, v in limits.items() if k in supported}
    if options.backend == "inductor":
        extra["options"] = inductor_options(options.mode, DYNAMIC[options.dynamic])
    compiled = torch.compile(
        named_body, backend=options.backend, fullgraph=options.fullgraph, dynamic=DYNAMIC[options.dynamic], **extra
    )
    if options.dynamic != "false":
        compiled = _without_autograd_cache(compiled)
    return compiled if limits_each_region() else _within_limit(compiled, options.limit)


def inductor_options(mode: str, dynamic: bool | None) -> dict[str, Any]:
    """Return the options of an inductor mode, without the fusions that compute wrong results, and with sums of products
    made in place if torch copies one of them first. Max-autotune chooses from kernels that copy nothing.

    Since torch 2.10 one kernel reduces along rows and along columns ("mix-order reduction") if there are many rows. It
    drops gradients that are slices of one tensor, as of a modulation at batch 1: that memory is never written
    (pytorch/pytorch issue 193061; an H100 gave NaN for Wan). It also adds rows that do not exist (195845). Two separate
    kernels move as many bytes.
    """
    from torch._inductor import config, list_mode_options

    options = dict(list_mode_options(mode, dynamic))
    if hasattr(config.triton, "mix_order_reduction"):
        options["triton.mix_order_reduction"] = False
    if add_product.COPIES_ADDEND and not options.get("max_autotune"):
        from ..models.adapters.graph_pass import ADD_PRODUCTS_IN_PLACE

        options["post_grad_custom_post_pass"] = ADD_PRODUCTS_IN_PLACE
    return options


def run_block(block: Block, *args: Any) -> Any:
    """Body of every training region."""
    return block(*args)


def _without_autograd_cache(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Disable AOTAutograd's cache for `compiled`.

    Its key omits the guards that dynamo has recorded so far, so that a graph for one size is a cache hit for another,
    with the first size's constants: positions that core computes from the height and width come out wrong, without an
    error (seen with torch 2.14; pytorch/pytorch issue 194001 has the same cause). Inductor's own cache is still used.
    """
    from torch._functorch import config

    def run(*args: Any) -> Any:
        previous = config.enable_autograd_cache
        config.enable_autograd_cache = False  # takes a fifth of the time of patch(), at each block of each step
        try:
            return compiled(*args)
        finally:
            config.enable_autograd_cache = previous

    return run


def _within_limit(compiled: Callable[..., Any], limit: int) -> Callable[..., Any]:
    from torch._dynamo import config

    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    graph_limit = max(limit, getattr(config, name))

    def run(*args: Any) -> Any:
        with config.patch({name: graph_limit}):
            return compiled(*args)

    return run


class Region:
    """One compiled callable that runs uncompiled, with a note, if compiling fails. Call it like `body`.

    It is first compiled as one graph (`fullgraph`): such a compile fails before anything has run, so the call can be
    repeated eagerly. ComfyUI's blocks modify their inputs in place, which rules that out once a part has run. A body
    with graph breaks is compiled in pieces, each of which falls back on its own inside torch, unless
    `options.fullgraph` requires one graph.
    """

    def __init__(
        self,
        name: str,
        label: str,
        body: Callable[..., Any],
        options: CompileOptions,
        notify: Notify,
        device: torch.device,
    ):
        self.name = name
        self.body = body
        self.options = options
        self.notify = notify
        self.device = device
        self.report = RegionReport(name, label, options)
        self.full = False
        self._left_eager: set[Any] = set()
        self._fullgraph = True
        self._to_measure = False
        self._run: Callable[..., Any] | None = None
        try:
            self._compile(fullgraph=True)
        except RuntimeError as error:  # torch refuses to compile at all on some builds of Python
            self.fall_back(f"torch.compile does not work here: {first_line(error)}")

    def _compile(self, fullgraph: bool) -> None:
        self._fullgraph = fullgraph
        self._run = compiled_function(self.body, self.name, replace(self.options, fullgraph=fullgraph))

    @property
    def eager(self) -> bool:
        """Return whether no part of it is compiled any more."""
        return self._run is None

    def fall_back(self, sentence: str) -> None:
        """Run eagerly from now on."""
        self._run = None
        self.note(sentence)

    def note(self, sentence: str) -> None:
        self.report.notes.append(sentence)
        self.notify(sentence)

    def next_run(self) -> None:
        """Begin a new image: sizes that ran eager because of the limit may fit a graph again."""
        self._left_eager.clear()

    def __call__(self, *args: Any, may_measure: bool = False) -> Any:
        """Call `body`.

        may_measure: after a compile the next call that needs no compile may be repeated on copies of its inputs,
        compiled and eager, to time both.
        """
        if self._run is None or (self._left_eager and signature(args) in self._left_eager):
            self.report.count_eager_call()
            return self.body(*args)
        measuring = self._to_measure and may_measure
        timing_args = copy_containers(args) if measuring else args
        try:
            with self.report.watch(self.device) as record, self._pieces_fall_back_alone():
                out = self._run(*args)
        except Exception as error:
            self.report.drop_failed_call()
            if comfy.model_management.is_oom(error):
                raise
            if self._drops_cuda_graphs(error):
                return self._repeat_eager(error, args)
            return self._handle_failure(error, record.event, args)
        if record.event is not None:
            self._to_measure = self._to_measure or record.event.graphs > 0
            self._check_limit(record.event)
        elif measuring:
            self._to_measure = False
            self._measure(timing_args)
        return out

    def _measure(self, args: tuple[Any, ...]) -> None:
        """Time it on copies of the inputs, compiled and eager."""
        assert self._run is not None
        try:
            speed = timing.compare(self._run, self.body, args)
        except Exception as error:
            if not self._drops_cuda_graphs(error):
                raise
            return
        if speed is not None:
            self.report.speeds.append(speed)

    def _drops_cuda_graphs(self, error: Exception) -> bool:
        """Compile it again without CUDA graphs if making one has failed. Returns False for other errors."""
        if not self.options.cuda_graphs() or not from_cuda_graphs(error):
            return False
        self.options = self.options.without_cuda_graphs()
        self.report.change_options(self.options)
        self.note(
            f"{self.report.label} is compiled without CUDA graphs from here on (backend {self.options.backend}, mode "
            f"{self.options.mode}), since making one failed: {first_line(error)}"
        )
        self._compile(self._fullgraph)
        return True

    def _repeat_eager(self, error: Exception, args: tuple[Any, ...]) -> Any:
        """Repeat eagerly a call whose CUDA graph failed: kernels that are being recorded have not run.

        Raises CompileFailed for a body in pieces: those before the failed one have run, and may have modified the
        inputs.
        """
        if not self._fullgraph:
            raise CompileFailed(
                f"A CUDA graph failed in the middle of {self.report.label}: {first_line(error)} Queue again: it is "
                "compiled without CUDA graphs from here on."
            ) from error
        self.report.count_eager_call()
        return self.body(*args)

    def _check_limit(self, event: CompileEvent) -> None:
        """Note that the limit is reached: for a body in pieces, torch itself continues eagerly."""
        if event.limit_reached and not self.full:
            self.full = True
            self.note(self._limit_sentence())

    def _limit_sentence(self) -> str:
        return (
            f"{self.report.label}: cache_size_limit {self.options.limit} is reached, so further sizes run uncompiled. "
            "Raise cache_size_limit, set dynamic to true, or use fewer sizes."
        )

    def _pieces_fall_back_alone(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._fullgraph else torch._dynamo.config.patch(suppress_errors=True)

    def _handle_failure(self, error: Exception, event: CompileEvent | None, args: tuple[Any, ...]) -> Any:
        """Handle a compile that failed before any of the body has run: this call runs eagerly."""
        log.debug("%s", self.name, exc_info=error)
        full = over_the_limit(error)
        broken = graph_break(error, event) if self._fullgraph else None
        cause = cannot_compile(error)
        if not full and broken is None and cause is None:
            raise error
        # Errors of the body itself, interrupts included, propagate from here and say nothing about compiling.
        out = self.body(*args)
        self.report.count_eager_call()
        if full:
            self._left_eager.add(signature(args))
            if not self.full:
                self.full = True
                self.note(self._limit_sentence())
        elif broken is None:
            self.fall_back(f"{self.report.label} runs uncompiled, because compiling failed: {cause}")
        elif self.options.fullgraph:
            raise CompileFailed(
                f"fullgraph is on, but {self.report.label} can't be compiled as one graph: {broken} Switch fullgraph "
                "off on Compile Model."
            ) from error
        else:
            self.note(f"{self.report.label} is compiled in pieces: {broken}")
            self._compile(fullgraph=False)
        return out


class RegionTable(dict[tuple[str, CompileOptions], Region]):
    """The regions of one model, by what they run and by their options."""

    _numbers = itertools.count(1)

    def __init__(self, notify: Notify, device: torch.device):
        super().__init__()
        self.notify, self.device = notify, device

    def region(self, key: str, body: Callable[..., Any], options: CompileOptions) -> Region:
        """Return the region of this key and these options, which is made at first."""
        if (key, options) not in self:
            label = self._label(key.partition(":")[0])
            # The number distinguishes compiled models: torch remembers by name which sizes have varied, and would make
            # the first graph of a new model dynamic at once.
            name = re.sub(r"\W", "_", f"run_{label}_{next(self._numbers)}")
            self[key, options] = Region(name, label, body, options, self.notify, self.device)
        return self[key, options]

    def _label(self, kind: str) -> str:
        """Return a region's label in the report; several regions of one name are numbered."""
        count = sum(region.report.label.partition(" ")[0] == kind for region in self.values())
        return kind if not count else f"{kind} ({count + 1})"


def signature(value: Any) -> Any:
    """Return the shapes, dtypes and devices of a call's inputs, as a key; options and modules are left out."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, value.device)
    if isinstance(value, tuple | list):
        return tuple(signature(inner) for inner in value)
    if isinstance(value, dict):
        return tuple((key, signature(inner)) for key, inner in value.items() if key != "transformer_options")
    return value if isinstance(value, int | float | str | bool) else None


def first_line(error: BaseException) -> str:
    """Return the first informative line: torch puts a line that only names the backend before a backend's error."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if not line.endswith("raised:")), lines[0])[:300]


def graph_break(error: BaseException, event: CompileEvent | None) -> str | None:
    """Describe the graph break if `error` says that the body does not trace as one graph, else return None.

    Gives the line and the cause; without a record of it in `event` only the cause.
    """
    from torch._dynamo.exc import Unsupported, UserError

    if not isinstance(error, Unsupported | UserError):
        return None
    return format_break(event.breaks[-1]) if event is not None and event.breaks else explain_break(str(error))


def cannot_compile(error: BaseException) -> str | None:
    """Return the cause in one line if `error` comes from compiling, else None.

    Examples: no compiler, no Triton, an op that does not trace. Reaching the limit of graphs is not such a case: see
    `over_the_limit`.
    """
    from torch._dynamo.exc import TorchDynamoException

    cause: BaseException | None = error
    while cause is not None:
        if over_the_limit(cause):
            return None
        if isinstance(cause, TorchDynamoException) or type(cause).__module__.startswith("torch._inductor"):
            return first_line(cause)
        cause = cause.__cause__
    return None


def over_the_limit(error: BaseException) -> bool:
    """Return True if dynamo gave up because a region met more shapes than its limit allows."""
    return isinstance(error, TooManyGraphs) or type(error).__name__ in (
        "FailOnRecompileLimitHit",
        "RecompileLimitExceeded",
        "CacheLimitExceeded",
    )

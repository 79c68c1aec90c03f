"""CUDA graphs where torch's memory allocator can't make them, and where making one fails; no GPU is needed for that."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import tiny
import torch
from tessera.compile import cuda_graphs
from tessera.compile import region as region_module
from tessera.compile.attach import compile_model
from tessera.compile.cuda_graphs import memory_allocator, no_cuda_graphs
from tessera.compile.region import CompileFailed, Region
from tessera.compile.report import timing
from tessera.compile.settings import CompileOptions, CompileSettings
from tessera.compile.tune import results
from tessera.compile.tune.inputs import StepSize, step_inputs
from tessera.compile.tune.results import result_key
from tessera.compile.tune.search import tune
from tessera.train.config.environment import memory_peak
from tiny.models.sampling import sample
from torch import Tensor
from torch._inductor import list_mode_options

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ASYNC = (
    "torch allocates memory by cudaMallocAsync here, which can't make them; start ComfyUI with --disable-cuda-malloc "
    "to have them"
)
UNSUPPORTED = (
    "cudaMallocAsync does not yet support getCheckpointState. If you need it, please file an issue describing your use "
    "case."
)
ASKED = {
    "mode reduce-overhead": ({"mode": "reduce-overhead"}, ("inductor", "default")),
    "mode max-autotune": ({"mode": "max-autotune"}, ("inductor", "max-autotune-no-cudagraphs")),
    "backend cudagraphs": ({"backend": "cudagraphs"}, ("inductor", "default")),
}


@pytest.fixture
def flux(tiny_files: dict[str, Any]) -> Any:
    return tiny.load_model("flux", tiny_files["flux"])


@pytest.fixture
def cuda_malloc_async(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer of torch under ComfyUI's own choice on nearly every NVIDIA card."""
    for module in (cuda_graphs, results):
        monkeypatch.setattr(module, "memory_allocator", lambda device: "cudaMallocAsync")


def uncompiled(body: Callable[..., Any], name: str, options: CompileOptions) -> Callable[..., Any]:
    return body


@pytest.mark.parametrize(
    ("allocator", "reason"),
    [
        ("native", None),
        ("cudaMallocAsync", ASYNC),
        ("pluggable", "torch allocates memory by pluggable here, which can't make them"),
    ],
)
def test_the_allocator_says_whether_there_can_be_cuda_graphs(allocator, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)
    assert (memory_allocator(CUDA), no_cuda_graphs(CUDA)) == (allocator, reason)
    assert (memory_allocator(CPU), no_cuda_graphs(CPU)) == (None, None)


def test_the_summary_of_a_run_names_the_allocator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * 2**20)
    assert memory_peak(CUDA) == {"peak_memory_mib": 3, "peak_memory_of": "GPU", "allocator": "cudaMallocAsync"}
    assert "allocator" not in memory_peak(CPU)


def graph_notes(notes: list[str]) -> list[str]:
    """Without what is said of the CPU, and of a torch that has no limit for each region."""
    return [note for note in notes if "no CUDA graphs here" not in note and "no limit for each region" not in note]


@pytest.mark.parametrize("scope", ["blocks", "stack", "model"])
@pytest.mark.parametrize("case", ASKED)
def test_under_cuda_malloc_async_nothing_takes_cuda_graphs_and_the_node_says_why(
    case, scope, flux, cuda_malloc_async, monkeypatch
):
    """Only how each region is to be compiled is looked at: in inductor's place the code itself runs."""
    monkeypatch.setattr(region_module, "compiled_function", uncompiled)
    values, (backend, mode) = ASKED[case]
    compiled, compiled_model = compile_model(flux, CompileSettings(scope=scope, **values))
    subject = "the model is" if scope == "model" else "blocks are"
    sentence = f"{case}: {subject} compiled without CUDA graphs (backend {backend}, mode {mode}), because {ASYNC}."
    said = graph_notes(compiled_model.notes)
    assert said == [sentence]  # before anything is sampled
    assert torch.equal(sample(compiled, "flux"), sample(flux, "flux"))
    assert {(r.options.backend, r.options.mode) for r in compiled_model.regions.values()} == {(backend, mode)}
    assert graph_notes(compiled_model.notes) == said


def test_tune_compile_leaves_them_out_and_remembers_for_this_allocator(tiny_files, cuda_malloc_async):
    model = tiny.load_model("wan", tiny_files["wan"])
    inputs = step_inputs(model, StepSize(64, 64, text_length=16, cfg=1.0))
    trials = [CompileSettings(mode="reduce-overhead"), CompileSettings(backend="cudagraphs", scope="model")]
    result = tune(model, inputs, 1000, trials, lambda count, text: None)
    assert [(row.settings, row.reason, row.failed) for row in result.unmeasured] == [
        (s, f"{ASYNC}.", False) for s in trials
    ]
    assert result.measured == () and result.key["allocator"] == "cudaMallocAsync"


def test_a_result_of_the_native_allocator_is_known_by_what_it_was_known_by(tiny_files, monkeypatch):
    model = tiny.load_model("wan", tiny_files["wan"])
    inputs = step_inputs(model, StepSize(64, 64, text_length=16, cfg=1.0))
    plain = result_key(model, inputs)
    monkeypatch.setattr(cuda_graphs, "memory_allocator", lambda device: "native")
    assert result_key(model, inputs) == plain and "allocator" not in plain


# Where making one fails.


def raise_in(module: str, message: str) -> Callable[[], None]:
    """A function that raises RuntimeError from code of a module of this name."""

    def fail() -> None:
        raise RuntimeError(message)

    code = fail.__code__
    return FunctionType(code, {"__name__": module, "RuntimeError": RuntimeError}, "fail", None, fail.__closure__)


class Recording:
    """Stands for torch.compile: a callable with CUDA graphs fails at the call that records one, as inductor's do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, failing_call: int, fail: Callable[[], None]):
        self.failing_call, self.fail = failing_call, fail
        self.hows: list[CompileOptions] = []
        self.calls = 0
        monkeypatch.setattr(region_module, "compiled_function", self.compiled_function)

    def compiled_function(self, body: Callable[..., Any], name: str, options: CompileOptions) -> Callable[..., Any]:
        self.hows.append(options)

        def run(*args: Any) -> Any:
            self.calls += 1
            if options.cuda_graphs() and self.calls == self.failing_call:
                self.fail()
            return body(*args)

        return run


def double(block: Any, x: Tensor) -> Tensor:
    return x * 2


def make_region(notes: list[str], mode: str = "reduce-overhead") -> Region:
    return Region("run", "Block", double, CompileOptions(mode=mode), notes.append, CPU)


def test_a_region_whose_cuda_graph_fails_goes_on_without_and_says_so_once(monkeypatch):
    recording = Recording(monkeypatch, failing_call=2, fail=raise_in("torch._inductor.cudagraph_trees", UNSUPPORTED))
    notes: list[str] = []
    region, x = make_region(notes), torch.ones(3)
    for _ in range(4):
        assert torch.equal(region(None, x), 2 * x)
    assert notes == [
        "Block is compiled without CUDA graphs from here on (backend inductor, mode default), since making one failed: "
        f"{UNSUPPORTED}"
    ]
    assert [options.mode for options in recording.hows] == ["reduce-overhead", "default"]
    assert region.options == region.report.options == CompileOptions()
    assert (region.report.compiled_calls, region.report.eager_calls) == (3, 1) and not region.eager


def test_one_that_fails_while_it_is_timed_costs_the_timing_only(monkeypatch):
    Recording(monkeypatch, failing_call=2, fail=raise_in("torch.cuda.graphs", "CUDA error: operation not permitted"))
    notes: list[str] = []
    region, x = make_region(notes), torch.ones(3)
    region._to_measure = True
    assert torch.equal(region(None, x, may_measure=True), 2 * x)
    assert len(notes) == 1 and notes[0].endswith("since making one failed: CUDA error: operation not permitted")
    assert region.report.speeds == [] and region.report.eager_calls == 0
    assert torch.equal(region(None, x), 2 * x)


def test_call_in_pieces_is_not_made_twice(monkeypatch):
    Recording(monkeypatch, failing_call=2, fail=raise_in("torch._inductor.cudagraph_trees", UNSUPPORTED))
    notes: list[str] = []
    region, x = make_region(notes), torch.ones(3)
    region(None, x)
    region._fullgraph = False
    with pytest.raises(CompileFailed, match=r"^A CUDA graph failed in the middle of Block: .* Queue again: it is comp"):
        region(None, x)
    assert torch.equal(region(None, x), 2 * x) and len(notes) == 1


@pytest.mark.parametrize(
    ("module", "mode"),
    [("somewhere.else", "reduce-overhead"), ("torch._inductor.cudagraph_trees", "default")],
)
def test_other_errors_come_through(module, mode, monkeypatch):
    recording = Recording(monkeypatch, failing_call=1, fail=raise_in(module, "a fault of the model"))
    notes: list[str] = []
    region = make_region(notes, mode)
    if mode == "default":
        region._run = lambda *args: recording.fail()
    with pytest.raises(RuntimeError, match="a fault of the model"):
        region(None, torch.ones(3))
    assert notes == []


# What is compiled, and what the report says of it.


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_the_mode_reaches_torch_compile_for_the_backend_that_has_modes(backend, mode, flux, monkeypatch):
    compilations: list[dict[str, Any]] = []

    def compile(model: Any, *, fullgraph=False, dynamic=None, backend="inductor", mode=None, options=None, **_: Any):  # noqa: A001
        assert mode is None  # torch.compile takes one of the two
        compilations.append({"backend": backend, "options": options})
        return model

    monkeypatch.setattr(region_module.torch, "compile", compile)
    compiled, _ = compile_model(flux, CompileSettings(backend, mode))
    sample(compiled, "flux", steps=1)
    reached = region_module.inductor_options(mode, None) if backend == "inductor" else None
    assert compilations == [{"backend": backend, "options": reached}] * 2  # two kinds of block
    assert backend != "inductor" or list_mode_options(mode, None).items() <= reached.items()


def test_the_speed_in_the_report_is_eager_beside_compiled(monkeypatch):
    seconds = {"compiled": 0.01, "eager": 0.04}
    monkeypatch.setattr(timing, "seconds_of", lambda function, args: seconds[function])
    speed = timing.compare("compiled", "eager", (None, torch.ones(2, 3)))
    assert (speed.size, speed.eager_ms, speed.compiled_ms) == ("2x3", 40.0, 10.0)
    assert speed.gain == 4.0

"""The tuner's decisions, on real models: a clock of the test's own says what steps and compiles take."""

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from comfy import model_management
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from tessera.compile.attach import compile_model, compiled_model_of
from tessera.compile.compiled_model import CompiledModel
from tessera.compile.settings import CompileSettings
from tessera.compile.tune.chart import plot_tuning
from tessera.compile.tune.inputs import StepSize, pooled_width, step_inputs, text_width
from tessera.compile.tune.results import (
    MeasuredSettings,
    Quartiles,
    TuneResult,
    UnmeasuredSettings,
    file_name,
    label,
    read_result,
    result_key,
    to_json,
)
from tessera.compile.tune.search import candidates, tune, tuned_model
from tessera.models.catalogue.swapped_model import SwapSettings, swap
from torch._dynamo.backends import registry
from torch._dynamo.utils import counters

SIZE = StepSize(64, 64, text_length=16, cfg=1.0)
COMPILE = 10.0  # seconds that each graph takes on the test's clock
EAGER_STEP = 1.0
BLOCKS = 2  # of the tiny Wan, of one kind


class Clock:
    """compiled_calls: of blocks, by the backends below."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.compiled_calls = 0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def tiny_wan(tiny_files: dict[str, Path]) -> Any:
    return tiny.load_model("wan", tiny_files["wan"])


@pytest.fixture
def clock() -> Iterator[Clock]:
    """With backends that move it: `fast` halves the tiny Wan's steps, `faster` takes three quarters away, `slow`
    doubles them; `broken` can't compile, `hungry` runs out of memory."""
    clock = Clock()

    def backend(change: float) -> Callable[..., Any]:
        def compile_graph(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            clock.advance(COMPILE)

            def run(*args: Any) -> Any:
                clock.compiled_calls += 1
                clock.advance(change / BLOCKS)
                return module.forward(*args)

            return run

        return compile_graph

    def broken(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        raise RuntimeError("this machine has no compiler")

    def hungry(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        return run

    backends = {
        "fast": backend(-0.5),
        "faster": backend(-0.75),
        "slow": backend(1.0),
        "broken": broken,
        "hungry": hungry,
    }
    for name, compiler in backends.items():
        registry.register_backend(compiler, name)
    yield clock
    for name in backends:
        del registry._COMPILER_FNS[name], registry._BACKENDS[name]


def on_clock(model: Any, clock: Clock, seconds: float = EAGER_STEP) -> Any:
    """The MODEL, loaded, each call of which takes so long on the clock."""
    model_management.load_models_gpu([model])

    def apply_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
        clock.advance(seconds)
        return executor(*args, **kwargs)

    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", apply_model)
    return clone


def backend(name: str, scope: str = "blocks") -> CompileSettings:
    return CompileSettings(backend=name, scope=scope)


def run(
    model: Any, trials: list[CompileSettings], clock: Clock, budget: float = 1000, progress: Any = None
) -> TuneResult:
    tell = progress if callable(progress) else lambda count, text: None
    return tune(model, step_inputs(model, SIZE), budget, trials, tell, clock)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def state_of(model: Any) -> dict[str, Any]:
    """Everything about a MODEL that a node could change."""
    modules = model.model.diffusion_model.modules()
    return {
        "wrappers": {kind: {k: list(v) for k, v in entries.items()} for kind, entries in model.wrappers.items()},
        "callbacks": {kind: {k: list(v) for k, v in entries.items()} for kind, entries in model.callbacks.items()},
        "attachments": dict(model.attachments),
        "patches": dict(model.patches),
        "options": str(model.model_options),
        "names": list(model.model_state_dict()),
        # What begins with comfy_ says how far ComfyUI has loaded the module.
        "own attributes": [sorted(n for n in vars(m) if not n.startswith("comfy_")) for m in modules],
    }


def sample_as_tuned(model: Any, name: str, **sizes: Any) -> torch.Tensor:
    return tiny.sample(model, name, width=64, height=64, **sizes)


# What is measured


def test_eager_is_measured_first_then_the_candidates_in_their_order(tiny_wan: Any, clock: Clock) -> None:
    messages: list[tuple[int, str]] = []
    result = run(
        on_clock(tiny_wan, clock),
        [backend("slow"), backend("fast")],
        clock,
        progress=lambda n, text: messages.append((n, text)),
    )
    assert messages == [
        (0, "Measuring eager"),
        (1, "Measuring blocks, slow (1 of 2)"),
        (2, "Measuring blocks, fast (2 of 2)"),
    ]
    assert [row.settings.backend for row in result.measured] == ["slow", "fast"]
    assert result.unmeasured == ()


def test_the_fastest_is_recommended_with_its_gain_its_compile_time_and_when_that_is_won_back(
    tiny_wan: Any, clock: Clock
) -> None:
    result = run(on_clock(tiny_wan, clock), [backend("fast"), backend("faster"), backend("slow")], clock)
    assert result.eager == Quartiles(1000, 1000, 1000)
    fast, faster, slow = result.measured
    assert (fast.step, fast.gain) == (Quartiles(500, 500, 500), Quartiles(2, 2, 2))
    assert (faster.step, faster.gain) == (Quartiles(250, 250, 250), Quartiles(4, 4, 4))
    assert (slow.step, slow.gain) == (Quartiles(2000, 2000, 2000), Quartiles(0.5, 0.5, 0.5))
    assert [row.graphs for row in result.measured] == [1, 1, 1]
    assert fast.compile_seconds == pytest.approx(COMPILE, abs=2)
    assert fast.pays_after() == pytest.approx(COMPILE / 0.5, abs=4)
    assert slow.pays_after() is None
    assert result.best() is faster
    assert "Best: backend faster, mode default, scope blocks, 4.00 times as fast as uncompiled." in result.text()


def test_compiled_and_eager_steps_are_taken_by_turns(tiny_wan: Any, clock: Clock) -> None:
    model, steps = tiny_wan.clone(), []

    def step(executor: Any, *args: Any, **kwargs: Any) -> Any:
        start = clock.compiled_calls
        out = executor(*args, **kwargs)
        steps.append(clock.compiled_calls - start)
        return out

    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "test", step)
    run(on_clock(model, clock), [backend("fast")], clock, budget=40)
    assert steps[:4] == [0, 0, 0, 0]  # eager as it came
    assert steps[-6:] == [BLOCKS, 0, BLOCKS, 0, BLOCKS, 0]


def test_a_setting_that_is_not_faster_than_eager_is_not_recommended(tiny_wan: Any, clock: Clock) -> None:
    model = on_clock(tiny_wan, clock)
    result = run(model, [backend("slow")], clock)
    assert result.best() is None
    assert "the MODEL stays uncompiled" in result.text()
    assert tuned_model(model, result) is model


def test_a_gain_within_the_spread_of_the_measurements_is_none() -> None:
    row = MeasuredSettings(backend("fast"), Quartiles(90, 95, 100), Quartiles(0.9, 1.05, 1.1), 1.0, 0, 2)
    assert not row.faster()
    assert replace(row, gain=Quartiles(1.03, 1.05, 1.07)).faster()
    assert not replace(row, gain=Quartiles(1.005, 1.005, 1.005)).faster()


def test_a_candidate_slower_than_the_model_as_it_came_is_not_recommended() -> None:
    """Under dynamic VRAM its pairs are made on another loading of the model, which may be slower."""
    row = MeasuredSettings(backend("fast"), Quartiles(95, 95, 95), Quartiles(1.5, 1.5, 1.5), 1.0, 0, 2)
    assert result_of(row, eager=96).best() is row
    assert result_of(row, eager=94).best() is None


# The budget


def test_candidates_that_would_not_fit_by_the_compile_time_so_far_are_not_begun(tiny_wan: Any, clock: Clock) -> None:
    trials = [backend("fast"), backend("fast", "stack"), backend("faster"), backend("slow")]
    # After eager and the first candidate, a stack (its two blocks take sqrt 2 times as long) needs more than is left,
    # the next blocks do not, and for the last nothing is left.
    graph_count = graphs()
    result = run(on_clock(tiny_wan, clock), trials, clock, budget=40)
    assert [label(row.settings) for row in result.measured] == ["blocks, fast", "blocks, faster"]
    assert [label(row.settings) for row in result.unmeasured] == ["stack, fast", "blocks, slow"]
    assert not any(row.failed for row in result.unmeasured)
    assert graphs() - graph_count == 2
    assert "Left out: stack, fast: it would take about" in result.text()
    assert "raise time_budget" in result.text()
    assert clock.seconds <= 40


def test_with_a_budget_for_nothing_eager_is_still_measured(tiny_wan: Any, clock: Clock) -> None:
    graph_count = graphs()
    result = run(on_clock(tiny_wan, clock), [backend("fast")], clock, budget=1)
    assert (result.eager.median, result.measured) == (1000, ())
    assert graphs() == graph_count
    assert not result.complete(1)


def test_a_model_without_lists_of_blocks_is_only_compiled_whole(tiny_wan: Any, clock: Clock) -> None:
    model = on_clock(tiny_wan, clock)
    model.model.diffusion_model.blocks = torch.nn.ModuleList([])
    result = run(model, [backend("fast"), backend("fast", "stack"), backend("fast", "model")], clock)
    assert [label(row.settings) for row in result.measured] == ["model, fast"]
    assert {row.reason for row in result.unmeasured} == {"the model has no repeated blocks."}


# What goes wrong


def test_candidates_of_a_model_whose_blocks_stream_can_be_compiled_so(tiny_wan: Any, clock: Clock) -> None:
    swapped, _ = swap(tiny_wan, SwapSettings(1))
    trials = [backend("faster", "stack"), CompileSettings(mode="reduce-overhead"), backend("fast")]
    result = run(on_clock(swapped, clock), trials, clock)
    assert [row.settings for row in result.measured] == [trials[2]]
    assert [(row.settings, row.failed) for row in result.unmeasured] == [(trials[0], False), (trials[1], False)]
    assert all(row.reason.startswith("some blocks stream from RAM") for row in result.unmeasured)


def test_a_candidate_that_fails_is_listed_with_its_cause_and_the_others_are_measured(
    tiny_wan: Any, clock: Clock
) -> None:
    trials = [backend("broken"), backend("hungry"), backend("no_such"), backend("fast")]
    result = run(on_clock(tiny_wan, clock), trials, clock)
    assert [label(row.settings) for row in result.measured] == ["blocks, fast"]
    failed = {row.settings.backend: row.reason for row in result.unmeasured if row.failed}
    assert "this machine has no compiler" in failed["broken"]
    assert failed["hungry"] == "out of memory."
    assert "backend 'no_such' is not installed" in failed["no_such"]
    assert result.best() is result.measured[0]


def test_steps_that_another_node_leaves_out_are_named(tiny_wan: Any, clock: Clock) -> None:
    model = tiny_wan.clone()
    steps: list[Any] = []

    def every_other(executor: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(x)
        return executor(x, *args, **kwargs) if len(steps) % 2 else torch.zeros_like(x)

    model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "cache", every_other)
    with pytest.raises(ValueError, match="another node leaves out or repeats steps"):
        run(model, [backend("fast")], clock)


def test_an_interrupt_leaves_nothing_behind(tiny_wan: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_clock(tiny_wan, clock)
    initial, models = state_of(model), compiled_models(monkeypatch)

    def interrupt_the_second(count: int, text: str) -> None:
        if count == 2:
            model_management.interrupt_current_processing()

    with pytest.raises(model_management.InterruptProcessingException):
        run(model, [backend("fast"), backend("faster")], clock, progress=interrupt_the_second)
    assert not model_management.processing_interrupted()
    assert state_of(model) == initial
    assert len(models) == 2
    gc.collect()  # the traceback held the second one
    assert [compiled_model() for compiled_model in models] == [None, None]


# Under dynamic VRAM, which ComfyUI has on GPUs only: the class says that it is one, reloading and sampling are real.


class UnderDynamicVram(ModelPatcher):
    def is_dynamic(self) -> bool:
        return True


def test_a_model_under_dynamic_vram_is_compared_with_itself_as_it_came(tiny_wan: Any, clock: Clock) -> None:
    tiny_wan.__class__ = UnderDynamicVram
    model = on_clock(tiny_wan, clock)
    result = run(model, [backend("fast"), backend("faster")], clock)
    assert result.eager == Quartiles(1000, 1000, 1000)
    assert [row.gain.median for row in result.measured] == [2, 4]
    assert all(any("loaded again without" in note for note in row.notes) for row in result.measured)
    tuned = tuned_model(model, result)
    assert not tuned.is_dynamic() and compiled_model_of(tuned).report().counts().graphs == 1


def test_a_model_that_cannot_leave_dynamic_vram_goes_out_as_it_came(tiny_wan: Any, clock: Clock) -> None:
    tiny_wan.__class__ = UnderDynamicVram
    tiny_wan.cached_patcher_init = None
    model = on_clock(tiny_wan, clock)
    result = run(model, [backend("fast")], clock)
    (row,) = result.unmeasured
    assert row.failed and "its loader can't load it without" in row.reason
    assert tuned_model(model, result) is model


# What is left


def test_the_model_stays_as_it_was_and_only_the_best_keeps_its_graphs(
    tiny_wan: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_clock(tiny_wan, clock)
    initial, models = state_of(model), compiled_models(monkeypatch)
    result = run(model, [backend("fast"), backend("faster"), backend("slow")], clock)
    assert state_of(model) == initial
    alive = [compiled_model() for compiled_model in models]
    assert [compiled_model and compiled_model.settings.backend for compiled_model in alive] == [None, "faster", None]
    compiled = tuned_model(model, result)
    assert compiled_model_of(compiled) is alive[1]
    assert state_of(model) == initial


def test_a_compile_model_in_front_keeps_its_graphs_and_its_model(tiny_wan: Any, clock: Clock) -> None:
    model = on_clock(tiny_wan, clock)
    in_front, compiled_model = compile_model(model, backend("slow"))
    sample_as_tuned(in_front, "wan", length=16)
    initial = state_of(in_front)
    result = run(in_front, [backend("slow"), backend("fast")], clock)
    assert state_of(in_front) == initial
    assert compile_model(model, backend("slow"))[1] is compiled_model
    assert result.eager == run(in_front, [], clock).eager == Quartiles(1000, 1000, 1000)  # measured without it
    assert compiled_model_of(tuned_model(in_front, result)).settings.backend == "fast"
    slow_only = replace(result, measured=result.measured[:1])
    uncompiled = tuned_model(in_front, slow_only)
    assert compiled_model_of(uncompiled) is None
    assert not uncompiled.get_wrappers(WrappersMP.APPLY_MODEL, "tessera.compile")


@pytest.mark.parametrize(
    ("name", "scope", "size", "sizes"),
    [
        ("flux", "blocks", StepSize(64, 64), {"length": 256}),
        ("flux", "stack", StepSize(64, 64), {"length": 256}),
        ("wan", "model", StepSize(64, 64, frames=5), {"length": 512, "cfg": 5.0, "frames": 5}),
        (
            "qwen_image",
            "blocks",
            StepSize(64, 64, text_length=16),
            {"length": 16, "negative_length": 8, "cfg": 4.0},
        ),
    ],
)
def test_the_returned_model_samples_the_tuned_size_without_compiling(
    name: str, scope: str, size: StepSize, sizes: dict[str, Any], tiny_files: dict[str, Path], clock: Clock
) -> None:
    model = tiny.load_model(name, tiny_files[name])
    expected = sample_as_tuned(model, name, **sizes)
    slow = on_clock(model, clock, seconds=2)
    result = tune(slow, step_inputs(slow, size), 10_000, [backend("fast", scope)], lambda count, text: None, clock)
    assert result.best() is not None
    compiled, graph_count = tuned_model(slow, result), graphs()
    out = sample_as_tuned(compiled, name, **sizes)
    assert graphs() == graph_count
    assert compiled_model_of(compiled).report().counts().graphs == result.measured[0].graphs > 0
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


# The inputs


@pytest.mark.parametrize("name", list(tiny.LOADERS))
def test_the_widths_of_a_models_text_are_read_from_its_layers(name: str, tiny_files: dict[str, Path]) -> None:
    model = tiny.load_model(name, tiny_files[name])
    tiny_inputs = tiny.INPUTS[name]
    assert (text_width(model.model), pooled_width(model.model)) == (tiny_inputs.text_width, tiny_inputs.pooled_width)
    frames = 9 if tiny_inputs.frames_per_latent else 1
    inputs = step_inputs(model, StepSize(96, 64, batch=2, frames=frames))
    expected = tiny.empty_latent(name, 96, 64, 2, frames)
    import comfy.sample

    assert inputs.latent.shape == comfy.sample.fix_empty_latent_channels(model, expected).shape
    inputs.sample(model, 1)


def test_usual_settings_of_a_model_are_sampled_unless_others_are_asked(tiny_files: dict[str, Path]) -> None:
    words = {name: step_inputs(tiny.load_model(name, tiny_files[name]), StepSize(64, 64)).size for name in tiny.LOADERS}
    assert words == {
        "flux": "64x64, batch 1, 256 text tokens, cfg 1",
        "schnell": "64x64, batch 1, 256 text tokens, cfg 1",
        "flux2": "64x64, batch 1, 512 text tokens, cfg 1",
        "wan": "64x64, batch 1, 512 text tokens, cfg 5",
        "wan_vace": "64x64, batch 1, 512 text tokens, cfg 5",
        "qwen_image": "64x64, batch 1, 128 and 8 text tokens, cfg 4",
        "sdxl": "64x64, batch 1, 77 text tokens, cfg 7",
    }
    wan = tiny.load_model("wan", tiny_files["wan"])
    inputs = step_inputs(wan, StepSize(64, 96, batch=2, frames=5, text_length=20, cfg=1.0))
    assert inputs.size == "64x96, 5 frames, batch 2, 20 text tokens, cfg 1"
    assert inputs.latent.shape == (2, 16, 2, 12, 8)
    assert inputs.positive[0][0].shape == (1, 20, tiny.T5_WIDTH)


def test_a_prompt_that_is_connected_is_what_is_sampled(tiny_flux: Any) -> None:
    prompt = tiny.conditioning("flux", 24)
    inputs = step_inputs(tiny_flux, replace(SIZE, cfg=3.0), prompt)
    assert inputs.positive is prompt
    assert inputs.size == "64x64, batch 1, 24 text tokens, cfg 3"
    assert torch.equal(inputs.negative[0][0], torch.zeros(1, 24, tiny.T5_WIDTH))
    inputs.sample(tiny_flux, 1)
    with_reference = [[prompt[0][0], prompt[0][1] | {"reference_latents": [torch.zeros(1, 16, 8, 8)]}]]
    other = step_inputs(tiny_flux, replace(SIZE, cfg=3.0), with_reference)
    assert file_name(result_key(tiny_flux, inputs)) != file_name(result_key(tiny_flux, other))


def test_weights_stored_otherwise_have_results_of_their_own(tmp_path: Path) -> None:
    """The dtype of a quantised weight is that of its values, and int8 takes the memory of fp8."""
    formats = []
    for storage in ("int8", "fp8"):
        model = tiny.load_flux(tiny.write_flux(tmp_path / f"{storage}.safetensors", quantised=storage))
        formats.append(result_key(model, step_inputs(model, SIZE))["dtypes"].partition(",")[0])
    assert formats == ["TensorWiseINT8Layout", "TensorCoreFP8E4M3Layout"]


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        (StepSize(8, 64), "width is 8; this model needs 16 pixels at least."),
        (StepSize(64, 8), "height is 8; this model needs 16 pixels at least."),
        (StepSize(64, 64, frames=5), "frames is 5, but this model makes pictures; set it to 1."),
    ],
)
def test_a_size_that_the_model_cannot_make_is_one_sentence(tiny_flux: Any, size: StepSize, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        step_inputs(tiny_flux, size)
    assert str(error.value) == sentence


def test_text_of_unknown_width_is_asked_for(tiny_flux: Any) -> None:
    model = tiny_flux.model.diffusion_model
    model.words = model.txt_in
    del model.txt_in
    with pytest.raises(ValueError, match="doesn't know what text Flux takes; connect a prompt for it to positive"):
        step_inputs(tiny_flux, SIZE)
    assert step_inputs(tiny_flux, SIZE, tiny.conditioning("flux", 24)).positive


def test_a_model_that_does_not_take_the_made_up_text_asks_for_a_prompt(tiny_flux: Any, clock: Clock) -> None:
    tiny_flux.model.diffusion_model.txt_in.in_features += 1
    with pytest.raises(
        ValueError, match=r"model: .*inputs that Flux takes \(.+\); connect a prompt for it to positive"
    ):
        run(tiny_flux, [backend("fast")], clock)


# What is remembered


def result_of(
    *rows: MeasuredSettings, eager: float = 100, unmeasured: tuple[UnmeasuredSettings, ...] = ()
) -> TuneResult:
    key = {"class": "Flux", "size": "64x64", "device": "a GPU", "torch": "2.14"}
    return TuneResult(key, Quartiles(eager, eager, eager), rows, unmeasured, 300, "2026-08-09 12:00")


FAST = MeasuredSettings(CompileSettings(), Quartiles(45, 50, 55), Quartiles(1.9, 2, 2.1), 20, 200, 2, ("A note.",))
LEFT_OUT = UnmeasuredSettings(CompileSettings(scope="stack"), "no time.", failed=False)
FAILED = UnmeasuredSettings(CompileSettings(scope="model"), "no compiler.", failed=True)


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = result_of(FAST, unmeasured=(LEFT_OUT, FAILED))
    file = tmp_path / file_name(result.key)
    file.write_text(to_json(result))
    assert read_result(file, result.key) == result
    assert read_result(tmp_path / "none.json", result.key) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "\x00",
        lambda text: text.replace('"64x64"', '"128x128"'),
        lambda text: text.replace('"scope": "blocks"', '"scope": "everything"'),
        lambda text: text.replace('"gain"', '"pain"'),
        lambda text: text.replace('"median": 50', '"median": "fifty"'),
        lambda text: json.dumps(json.loads(text) | {"format": 99}),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(damage: Callable[[str], str], tmp_path: Path) -> None:
    result = result_of(FAST)
    file = tmp_path / "broken.json"
    file.write_text(damage(to_json(result)))
    with pytest.raises(ValueError, match=r"The remembered result broken\.json can't be used \(.+\), so everything is "):
        read_result(file, result.key)


def test_a_result_is_good_for_the_same_model_size_machine_and_torch_only(
    tiny_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(model: Any, size: StepSize = SIZE) -> str:
        return file_name(result_key(model, step_inputs(model, size)))

    flux = tiny.load_model("flux", tiny_files["flux"])
    own_name = name(flux)
    assert name(tiny.load_model("flux", tiny_files["flux"])) == own_name
    other_names = [
        name(tiny.load_model("schnell", tiny_files["schnell"])),
        name(tiny.load_flux(tiny_files["flux"], dtype=torch.bfloat16)),
        name(flux, replace(SIZE, width=128)),
        name(flux, replace(SIZE, batch=2)),
        name(flux, replace(SIZE, text_length=32)),
        name(flux, replace(SIZE, cfg=2.0)),
    ]
    monkeypatch.setattr(torch, "__version__", "3.0")
    other_names.append(name(flux))
    assert len({own_name, *other_names}) == 8


def test_a_larger_budget_is_reason_to_measure_again_only_if_something_was_left_out() -> None:
    assert result_of(FAST).complete(1000)
    assert result_of(FAST, unmeasured=(FAILED,)).complete(1000)
    assert result_of(FAST, unmeasured=(LEFT_OUT,)).complete(300)
    assert not result_of(FAST, unmeasured=(LEFT_OUT,)).complete(301)
    assert not result_of(unmeasured=(FAILED,)).complete(300)


# What is shown


def test_the_table_names_each_outcome() -> None:
    text = result_of(FAST, unmeasured=(LEFT_OUT, FAILED)).text()
    assert text.splitlines() == [
        "Flux, 64x64; a GPU, torch 2.14",
        "settings         ms/step   gain  spread  compile s  memory MiB  pays after",
        "eager              100.0                                                  ",
        "blocks, default     50.0  2.00x    0.10       20.0         200   400 steps",
        "Best: backend inductor, mode default, scope blocks, 2.00 times as fast as uncompiled. The MODEL is compiled "
        "this way.",
        "Failed: model, default: no compiler.",
        "Left out: stack, default: no time.",
        "blocks, default: A note.",
        "Measured on 2026-08-09 12:00.",
    ]


def test_facts_are_plain_json() -> None:
    result = result_of(FAST, unmeasured=(LEFT_OUT, FAILED))
    facts = json.loads(json.dumps(result.facts(), allow_nan=False))
    assert facts["best"]["scope"] == "blocks"
    assert [row["label"] for row in facts["measured"]] == ["blocks, default"]
    assert [row["why"] for row in facts["unmeasured"]] == ["no time.", "no compiler."]


def test_bars_are_as_long_as_steps_take_and_the_best_stands_out() -> None:
    slow = replace(
        FAST, settings=CompileSettings(scope="stack"), step=Quartiles(75, 75, 75), gain=Quartiles(1.3, 1.3, 1.3)
    )
    fast = replace(FAST, step=Quartiles(50, 50, 50))
    picture = plot_tuning(result_of(fast, slow, unmeasured=(FAILED,)))
    assert picture.size == (1024, 512)
    pixels = np.asarray(picture).astype(int)

    def length(colour: tuple[int, int, int]) -> int:
        """Pixels of this colour in the line that has most of them."""
        return int((np.abs(pixels - colour).sum(-1) < 12).sum(1).max())

    eager = length((164, 173, 186))
    compiled = length((164, 199, 232))
    best = length((23, 92, 163))
    assert compiled == pytest.approx(0.75 * eager, abs=3)
    assert best == pytest.approx(0.5 * eager, abs=3)


def test_a_chart_of_all_that_a_gpu_tries_keeps_its_rows_apart() -> None:
    trials = candidates(torch.device("cuda"))
    rows = [replace(FAST, settings=settings, step=Quartiles(80, 80, 80)) for settings in trials]
    pixels = np.asarray(plot_tuning(result_of(*rows))).astype(int)
    bars = (np.abs(pixels[:, 450:470] - (164, 199, 232)).sum(-1) < 12).all(1)
    starts = int((bars[1:] & ~bars[:-1]).sum())
    assert starts == len(trials) - 1  # and the best in its own colour


def test_cuda_graphs_are_tried_on_cuda_only() -> None:
    cpu, cuda = candidates(torch.device("cpu")), candidates(torch.device("cuda"))
    assert not any(settings.options().cuda_graphs() for settings in cpu)
    assert [settings.options().cuda_graphs() for settings in cuda] == [False] * 5 + [True] * 2
    assert cpu[0] == cuda[0] == CompileSettings()
    assert {settings.dynamic for settings in cpu + cuda} == {"auto"}


def compiled_models(monkeypatch: pytest.MonkeyPatch) -> list["weakref.ref[CompiledModel]"]:
    """Fills with the compiled models that are made from here on."""
    models: list[weakref.ref[CompiledModel]] = []
    original = CompiledModel.__init__

    def init(self: CompiledModel, *args: Any) -> None:
        models.append(weakref.ref(self))
        original(self, *args)

    monkeypatch.setattr(CompiledModel, "__init__", init)
    return models

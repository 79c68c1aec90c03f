"""What can't be compiled, or not as it is set, runs eager or in pieces: one sentence, the right picture, never a dead
sampler unless fullgraph asked for it."""

import inspect
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import tiny
import torch
from tessera.compile import region as region_module
from tessera.compile.region import CompileFailed
from tessera.compile.settings import SCOPES, CompileOptions, parse_overrides
from thinned import one_in
from tiny.compile.compiling import Graphs, compiled
from tiny.models.sampling import sample
from torch import Tensor

pytestmark = pytest.mark.usefixtures("fresh_graphs")


@pytest.fixture
def wan(tiny_files: dict[str, Any]) -> Any:
    return tiny.load_model("wan", tiny_files["wan"])


@pytest.fixture
def flux(tiny_files: dict[str, Any]) -> Any:
    return tiny.load_model("flux", tiny_files["flux"])


def calls(compiled_model: Any) -> dict[str, tuple[int, int]]:
    """Of each region: how often it ran compiled and how often eager."""
    return {r.report.label: (r.report.compiled_calls, r.report.eager_calls) for r in compiled_model.regions.values()}


def with_attention(model: Any, attention: Callable[..., Tensor]) -> Any:
    """The MODEL behind a node that puts its own attention in."""
    clone = model.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = attention
    return clone


# Attention functions, as other packs write them.


def prints(attention: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    print(end="")
    return attention(*args, **kwargs)


def reads_a_value(attention: Callable[..., Tensor], q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if q.abs().max().item() > 1e9:
        q = q / 2
    return attention(q, *args, **kwargs)


@torch._dynamo.disable
def excluded(attention: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return attention(*args, **kwargs)


BREAKS = {
    prints: ('`print(end="")`. ', "The code prints or logs in the middle, which ends a graph"),
    reads_a_value: ("`if q.abs().max().item() > 1e9:`. ", "The code reads a tensor's value to decide how to go on"),
    excluded: ("(func, *args, **kwargs)`. ", "The code's author excluded this function from compiling: excluded"),
}


@pytest.mark.parametrize(("backend", "attention"), one_in(4, product(["eager", "aot_eager"], BREAKS)))
def test_graph_breaks_are_compiled_in_pieces_and_named_with_their_line(backend, attention, wan):
    model = with_attention(wan, attention)
    clone, compiled_model = compiled(model, backend=backend)
    for _ in range(2):
        assert torch.equal(sample(clone, "wan"), sample(model, "wan"))
    (note,) = compiled_model.notes
    line, cause = BREAKS[attention]
    assert note.startswith("WanAttentionBlock is compiled in pieces: ") and line + cause in note
    ran, eager = calls(compiled_model)["WanAttentionBlock"]
    assert eager == 1 and ran == 7  # two runs of two steps and two blocks; the call that failed was made eager
    counts = compiled_model.report().counts()
    assert counts.graphs > 1 and counts.graph_breaks > 0
    assert line + cause in compiled_model.report().text()


@pytest.mark.parametrize(("attention", "scope"), one_in(7, product(BREAKS, SCOPES)))
def test_with_fullgraph_it_is_an_error_with_the_line_and_nothing_is_left_behind(scope, attention, wan):
    model = with_attention(wan, attention)
    clone, compiled_model = compiled(model, scope=scope, fullgraph=True)
    region = "WanModel" if scope == "model" else "WanAttentionBlock"
    line, cause = BREAKS[attention]
    for _ in range(2):
        with pytest.raises(CompileFailed) as failed:
            sample(clone, "wan")
        sentence = str(failed.value)
        assert sentence.startswith(f"fullgraph is on, but {region} can't be compiled as one graph: ")
        assert line + cause in sentence and sentence.endswith(" Switch fullgraph off on Compile Model.")
        assert "\n" not in sentence
    breaking, other = compiled(wan, scope=scope, fullgraph=True)
    assert other is compiled_model and torch.equal(sample(breaking, "wan"), sample(wan, "wan"))
    assert compiled_model.report().counts().graphs == 1


@pytest.mark.parametrize("scope", one_in(3, SCOPES))
def test_model_without_a_working_compiler_is_eager_and_says_so_once(scope, wan, no_compiler):
    clone, compiled_model = compiled(wan, backend="inductor", scope=scope)
    for _ in range(2):
        assert torch.equal(sample(clone, "wan"), sample(wan, "wan"))
    (note,) = compiled_model.notes
    region = {"blocks": "WanAttentionBlock", "stack": "blocks", "model": "WanModel"}[scope]
    assert note.startswith(f"{region} runs uncompiled, because compiling failed: ")
    assert "compiler" in note.lower() and "\n" not in note
    ran, eager = calls(compiled_model)[region]
    assert ran == 0 and eager == {"blocks": 8, "stack": 3, "model": 4}[scope]
    assert "runs uncompiled" in compiled_model.report().text()


def test_a_torch_that_refuses_to_compile_is_named_and_the_model_runs_eager(wan, monkeypatch):
    def refuses(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("torch.compile is not supported on Python 3.99+")

    refuses.__signature__ = inspect.signature(torch.compile)  # type: ignore[attr-defined]
    monkeypatch.setattr(region_module.torch, "compile", refuses)
    clone, compiled_model = compiled(wan)
    assert torch.equal(sample(clone, "wan"), sample(wan, "wan"))
    assert compiled_model.notes == ["torch.compile does not work here: torch.compile is not supported on Python 3.99+"]


@pytest.mark.parametrize("backend", one_in(2, ["eager", "aot_eager"]))
def test_over_the_limit_known_sizes_stay_compiled_and_others_run_eager(backend, flux):
    clone, compiled_model = compiled(flux, backend=backend, dynamic="false", cache_size_limit=1)
    notes: list[str] = []
    compiled_model.notes.watch(notes.append)
    graphs = Graphs()
    for length in (9, 16, 9, 21, 9):
        call_counts = calls(compiled_model)
        assert torch.equal(sample(clone, "flux", length=length), sample(flux, "flux", length=length))
        assert graphs() == compiled_model.report().counts().graphs == 2
        for title, (ran, eager) in calls(compiled_model).items():
            ran_before, eager_before = call_counts.get(title, (0, 0))
            assert (ran - ran_before, eager - eager_before) == ((4, 0) if length == 9 else (0, 4))
    sentence = (
        "cache_size_limit 1 is reached, so further sizes run uncompiled. Raise cache_size_limit, set dynamic to true, "
    )
    said = [f"{kind}: {sentence}or use fewer sizes." for kind in ("DoubleStreamBlock", "SingleStreamBlock")]
    assert compiled_model.notes == notes == said


def test_fullgraph_does_not_make_the_limit_an_error(wan):
    clone, compiled_model = compiled(wan, dynamic="false", cache_size_limit=1, fullgraph=True)
    for length in (9, 16):
        assert torch.equal(sample(clone, "wan", length=length), sample(wan, "wan", length=length))
    assert len(compiled_model.notes) == 1 and "cache_size_limit 1 is reached" in compiled_model.notes[0]


def test_over_the_limit_in_pieces_torch_itself_runs_eager_and_it_is_said(wan):
    model = with_attention(wan, prints)
    clone, compiled_model = compiled(model, dynamic="false", cache_size_limit=1)
    for length in (9, 16, 9):
        assert torch.equal(sample(clone, "wan", length=length), sample(model, "wan", length=length))
    pieces, limit = compiled_model.notes
    assert "is compiled in pieces" in pieces and limit.startswith("WanAttentionBlock: cache_size_limit 1 is reached")


def test_settings_that_did_not_fit_are_tried_again_in_the_next_run(wan):
    clone, compiled_model = compiled(wan, dynamic="false", cache_size_limit=1)
    for length in (9, 16):
        sample(clone, "wan", length=length)
    assert calls(compiled_model) == {"WanAttentionBlock": (4, 4)}
    torch._dynamo.reset()  # torch forgets its graphs
    sample(clone, "wan", length=16)
    assert calls(compiled_model) == {"WanAttentionBlock": (8, 4)}


def test_a_patch_over_the_limit_leaves_runs_without_it_compiled(wan):
    def sharper(attention: Callable[..., Tensor], q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return attention(2 * q, *args, **kwargs)

    clone, compiled_model = compiled(wan, cache_size_limit=1)
    sample(clone, "wan")
    patched = with_attention(clone, sharper)
    assert torch.equal(sample(patched, "wan"), sample(with_attention(wan, sharper), "wan"))
    assert calls(compiled_model) == {"WanAttentionBlock": (4, 4)}
    assert torch.equal(sample(clone, "wan"), sample(wan, "wan"))
    assert calls(compiled_model) == {"WanAttentionBlock": (8, 4)}


OVERRIDES = [
    ("double_blocks.0 eager", {"DoubleStreamBlock": 2, "SingleStreamBlock": 4}),
    ("single_blocks.* eager", {"DoubleStreamBlock": 4}),
    ("* eager", {}),
    ("* eager\ndouble_blocks.1 dynamic=true", {"DoubleStreamBlock": 2}),
    (
        "*.1 backend=aot_eager",
        {"DoubleStreamBlock": 2, "DoubleStreamBlock (2)": 2} | {"SingleStreamBlock": 2, "SingleStreamBlock (2)": 2},
    ),
]


@pytest.mark.parametrize(("text", "expected"), OVERRIDES)
def test_overrides_reach_the_blocks_that_they_name_and_no_others(text, expected, flux):
    clone, compiled_model = compiled(flux, overrides=parse_overrides(text))
    assert torch.equal(sample(clone, "flux"), sample(flux, "flux"))
    assert {title: ran for title, (ran, _) in calls(compiled_model).items()} == expected
    assert compiled_model.report().counts().graphs == len(expected) and compiled_model.notes == []


def test_an_override_gives_a_block_a_backend_and_mode_of_its_own(flux):
    settings = {"overrides": parse_overrides("single_blocks.1 backend=inductor mode=reduce-overhead dynamic=false")}
    clone, compiled_model = compiled(flux, **settings)
    assert (sample(clone, "flux", steps=1) - sample(flux, "flux", steps=1)).abs().max() < 1e-4
    hows = {region.report.label: region.options for region in compiled_model.regions.values()}
    assert hows == {
        "DoubleStreamBlock": CompileOptions("eager"),
        "SingleStreamBlock": CompileOptions("eager"),
        "SingleStreamBlock (2)": CompileOptions("inductor", "reduce-overhead", "false"),
    }
    assert compiled_model.notes == ["mode reduce-overhead uses no CUDA graphs here: the model runs on cpu."]


def test_a_stack_whose_blocks_are_told_apart_is_compiled_block_by_block(flux):
    clone, compiled_model = compiled(flux, scope="stack", overrides=parse_overrides("double_blocks.0 eager"))
    assert torch.equal(sample(clone, "flux"), sample(flux, "flux"))
    assert compiled_model.notes == [
        "scope stack: double_blocks is compiled block by block, because overrides give its blocks different settings."
    ]
    assert {title: ran for title, (ran, _) in calls(compiled_model).items()} == {
        "DoubleStreamBlock": 2,
        "single_blocks": 1,
    }


def test_a_stack_that_is_overridden_whole_stays_one_region(flux):
    overrides = parse_overrides("double_blocks.* eager\nsingle_blocks.* dynamic=true")
    clone, compiled_model = compiled(flux, scope="stack", overrides=overrides)
    assert torch.equal(sample(clone, "flux"), sample(flux, "flux"))
    (region,) = compiled_model.regions.values()
    assert compiled_model.notes == [] and region.options.dynamic == "true"
    assert {title: ran for title, (ran, _) in calls(compiled_model).items()} == {"single_blocks": 1}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"overrides": parse_overrides("blocks.* eager")},
            "overrides: blocks.* matches no block of this model, which ",
        ),
        ({"backend": "turbo"}, "backend 'turbo' is not installed; choose one of inductor"),
        ({"mode": "quick"}, "mode is 'quick'; choose one of default"),
        ({"scope": "layers"}, "scope is 'layers'; choose one of blocks"),
        ({"cache_size_limit": 0}, "cache_size_limit is 0; it has to be at least 1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_and_leave_no_trace(settings, sentence, flux):
    for _ in range(2):
        with pytest.raises(ValueError) as refused:
            compiled(flux, **settings)
        assert str(refused.value).startswith(sentence)
    assert not flux.wrappers and not flux.attachments


def test_an_older_torch_works_and_says_what_is_lost(wan, monkeypatch):
    compile_now = torch.compile

    def older(*args: Any, **kwargs: Any) -> Any:
        assert not kwargs.keys() & {"recompile_limit", "isolate_recompiles"}
        return compile_now(*args, **kwargs)

    parameters = inspect.signature(compile_now).parameters.values()
    kept_parameters = [p for p in parameters if p.name not in ("recompile_limit", "isolate_recompiles")]
    older.__signature__ = inspect.Signature(kept_parameters)  # type: ignore[attr-defined]
    monkeypatch.setattr(region_module.torch, "compile", older)
    lengths = range(5, 5 + torch._dynamo.config.recompile_limit + 1)
    clone, compiled_model = compiled(wan, dynamic="false", cache_size_limit=len(lengths))
    for length in lengths:
        assert torch.equal(sample(clone, "wan", length=length, steps=1), sample(wan, "wan", length=length, steps=1))
    assert compiled_model.report().counts().graphs == len(lengths) == torch._dynamo.config.recompile_limit + 1
    (note,) = compiled_model.notes
    assert "has no limit for each region: cache_size_limit is set in torch's configuration" in note
    sample(clone, "wan", length=40, steps=1)
    assert "is reached" in compiled_model.notes[-1] and compiled_model.report().counts().graphs == len(lengths)


@torch.library.custom_op("tessera_tests::out_of_memory", mutates_args=())
def out_of_memory(x: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@out_of_memory.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("backend", one_in(2, ["eager", "aot_eager"]))
def test_running_out_of_memory_inside_is_not_taken_for_a_failed_compile(backend, wan):
    def hungry(attention: Callable[..., Tensor], q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return attention(out_of_memory(q), *args, **kwargs)

    clone, compiled_model = compiled(wan, backend=backend)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            sample(with_attention(clone, hungry), "wan")
    assert compiled_model.notes == []
    assert torch.equal(sample(clone, "wan"), sample(wan, "wan"))
    assert calls(compiled_model) == {"WanAttentionBlock": (4, 0)}

"""Fields of Compile Model: what they mean, what of it is ignored where, and what is refused with a sentence."""

import inspect

import pytest
import torch
from tessera.compile import settings as module
from tessera.compile.settings import (
    PRESETS,
    SCOPES,
    CompileOptions,
    CompileSettings,
    Override,
    backends,
    check_backend,
    parse_overrides,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BLOCKS = [f"double_blocks.{i}" for i in range(3)] + [f"single_blocks.{i}" for i in range(12)]
NESTED = ["input_blocks.1.0", "input_blocks.4.1.transformer_blocks.0", "input_blocks.4.1.transformer_blocks.1"]


def matched(pattern: str, blocks: list[str]) -> list[str]:
    return [block for block in blocks if Override(pattern).matches(block)]


@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [
        ("double_blocks.*", BLOCKS[:3]),
        ("double_blocks", BLOCKS[:3]),
        ("single_blocks.0-9", [f"single_blocks.{i}" for i in range(10)]),
        ("single_blocks.10-11", ["single_blocks.10", "single_blocks.11"]),
        ("single_blocks.1", ["single_blocks.1"]),
        ("single_blocks.1?", ["single_blocks.10", "single_blocks.11"]),
        ("*.0", ["double_blocks.0", "single_blocks.0"]),
        ("*_blocks.1-2", ["double_blocks.1", "double_blocks.2", "single_blocks.1", "single_blocks.2"]),
        ("*", BLOCKS),
        ("double_blocks.3", []),
        ("double_blocks.0.img_attn", []),
        ("blocks.*", []),
    ],
)
def test_a_pattern_names_blocks_part_by_part(pattern, blocks):
    assert matched(pattern, BLOCKS) == blocks


@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [
        ("input_blocks.4", NESTED[1:]),
        ("input_blocks.*", NESTED),
        ("input_blocks.*.0", NESTED[:1]),
        ("input_blocks.4.1.transformer_blocks.1", NESTED[2:]),
        ("input_blocks.4.1.*.0", NESTED[1:2]),
        ("transformer_blocks.*", []),
    ],
)
def test_a_pattern_covers_all_that_is_below_what_it_names(pattern, blocks):
    assert matched(pattern, NESTED) == blocks


def test_overrides_are_read_line_by_line_without_comments():
    text = """
    # the first ones gain nothing
    double_blocks.0-1 eager   # measured
    single_blocks.*  mode=max-autotune dynamic=false
    *.0 backend=aot_eager fullgraph=true
    """
    first, second, third = parse_overrides(text)
    assert first == Override("double_blocks.0-1", eager=True)
    assert second.apply(CompileOptions()) == CompileOptions(mode="max-autotune", dynamic="false")
    assert third.apply(CompileOptions(limit=3)) == CompileOptions(backend="aot_eager", fullgraph=True, limit=3)
    assert parse_overrides("") == parse_overrides(" \n # nothing\n") == ()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("double_blocks.*", "line 2: double_blocks.* has no setting"),
        ("double_blocks.* eager mode=default", "line 2: eager blocks are not compiled"),
        ("double_blocks.* fast", "line 2: 'fast' is not known; write eager, backend=…"),
        ("double_blocks.* scope=model", "line 2: 'scope=model' is not known"),
        ("double_blocks.* mode=quick", "line 2: mode is 'quick'; choose one of default"),
        ("double_blocks.* mode=default mode=max-autotune", "line 2: mode is given twice"),
        ("double_blocks.* dynamic=yes", "line 2: dynamic is 'yes'; choose one of auto, true, false"),
        ("double_blocks.* fullgraph=1", "line 2: fullgraph is '1'; choose one of true, false"),
    ],
)
def test_a_line_that_says_nothing_or_two_things_is_refused_by_its_number(line, sentence):
    with pytest.raises(ValueError, match="^overrides, ") as refused:
        parse_overrides(f"single_blocks.* eager\n{line}")
    assert sentence in str(refused.value)


def test_the_last_line_that_matches_a_block_counts():
    overrides = parse_overrides("* mode=max-autotune\nsingle_blocks.* eager\nsingle_blocks.1 dynamic=True")
    settings = CompileSettings(cache_size_limit=5, overrides=overrides)
    assert settings.options_for("double_blocks.0") == CompileOptions(mode="max-autotune", limit=5)
    assert settings.options_for("single_blocks.0") is None
    assert settings.options_for("single_blocks.1") == CompileOptions(dynamic="true", limit=5)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"mode": "fastest"}, "mode is 'fastest'; choose one of default"),
        ({"dynamic": "maybe"}, "dynamic is 'maybe'; choose one of auto, true, false"),
        ({"scope": "layers"}, "scope is 'layers'; choose one of blocks, stack, model"),
        ({"cache_size_limit": 0}, "cache_size_limit is 0; it has to be at least 1"),
        ({"backend": "turbo"}, "backend 'turbo' is not installed; choose one of inductor"),
        ({"overrides": parse_overrides("* backend=turbo")}, "backend 'turbo' is not installed"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_with_what_to_choose(values, sentence):
    with pytest.raises(ValueError) as refused:
        CompileSettings(**values).check()
    assert str(refused.value).startswith(sentence)


def test_a_backend_whose_package_is_missing_is_refused_with_the_packages_name(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="^backend tvm needs the package tvm, which is not installed"):
        check_backend("tvm")


def test_each_backend_of_the_menu_is_one_of_torchs_and_the_usual_ones_come_first():
    names = backends()
    assert names[:4] == ["inductor", "cudagraphs", "aot_eager", "eager"]
    assert len(set(names)) == len(names) and set(names) <= set(torch._dynamo.list_backends(exclude_tags=()))
    assert not [name for name in names if "TESTING" in name or "minifier" in name]
    for name in names[:4]:
        check_backend(name)


def compile_notes(settings, device):
    """Notes on what is ignored, without the sentence on a torch that has no limit for each region."""
    return [note for note in settings.ignored(BLOCKS, device) if "no limit for each region" not in note]


def test_settings_that_apply_have_no_note():
    for scope in SCOPES:
        assert compile_notes(CompileSettings(scope=scope), CUDA) == []
    assert compile_notes(CompileSettings(mode="max-autotune"), CUDA) == []
    assert compile_notes(CompileSettings(mode="max-autotune-no-cudagraphs"), CPU) == []
    assert compile_notes(CompileSettings(overrides=parse_overrides("*.0 eager")), CPU) == []


@pytest.mark.parametrize(
    ("values", "subject"),
    [
        ({"mode": "reduce-overhead"}, "mode reduce-overhead"),
        ({"mode": "max-autotune"}, "mode max-autotune"),
        ({"backend": "cudagraphs"}, "the backend cudagraphs"),
        ({"overrides": parse_overrides("*.0 mode=max-autotune")}, "mode max-autotune"),
    ],
)
def test_cuda_graphs_are_said_to_be_none_on_another_device(values, subject):
    settings = CompileSettings(**values)
    assert compile_notes(settings, CPU) == [f"{subject} uses no CUDA graphs here: the model runs on cpu."]
    assert compile_notes(settings, CUDA) == []


@pytest.mark.parametrize(("blocks", "names"), [(BLOCKS, "double_blocks.*, single_blocks.*"), ([], "none")])
def test_an_override_that_matches_nothing_is_refused_with_what_there_is(blocks, names):
    settings = CompileSettings(overrides=parse_overrides("blocks.* eager"))
    with pytest.raises(ValueError) as refused:
        settings.ignored(blocks, CPU)
    assert str(refused.value) == f"overrides: blocks.* matches no block of this model, which has {names}."


def test_a_torch_without_limits_of_ones_own_is_named_with_what_is_lost(monkeypatch):
    def older(model=None, *, fullgraph=False, dynamic=None, backend="inductor", mode=None, options=None): ...

    older.__signature__ = inspect.signature(older)
    monkeypatch.setattr(module.torch, "compile", older)
    (note,) = CompileSettings().ignored(BLOCKS, CPU)
    assert note.startswith(f"torch {torch.__version__} has no limit for each region: cache_size_limit is set in")


def test_every_preset_is_a_mode_and_a_scope():
    assert PRESETS.keys() == {"fast start", "balanced", "maximum speed"}
    for mode, scope in PRESETS.values():
        CompileSettings(mode=mode, scope=scope).check()


def test_settings_that_mean_the_same_are_the_same():
    texts = ("*.0 mode=max-autotune", "  *.0   mode=max-autotune  # measured\n\n")
    first, second = (CompileSettings(overrides=parse_overrides(text)) for text in texts)
    assert first == second and hash(first) == hash(second)


@pytest.mark.parametrize(
    ("backend", "mode", "fallback"),
    [
        ("inductor", "reduce-overhead", ("inductor", "default")),
        ("inductor", "max-autotune", ("inductor", "max-autotune-no-cudagraphs")),
        ("cudagraphs", "default", ("inductor", "default")),
        ("inductor", "max-autotune-no-cudagraphs", ("inductor", "max-autotune-no-cudagraphs")),
        ("aot_eager", "reduce-overhead", ("aot_eager", "reduce-overhead")),
    ],
)
def test_nearest_mode_is_taken_without_cuda_graphs_and_the_rest_stays(backend, mode, fallback):
    options = CompileOptions(backend, mode, "false", True, 7)
    assert options.without_cuda_graphs() == CompileOptions(*fallback, "false", True, 7)
    assert not options.without_cuda_graphs().cuda_graphs()

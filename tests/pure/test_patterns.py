import random
from fnmatch import fnmatchcase

import pytest
from tessera.lora import patterns
from tessera.lora.patterns import (
    RankPattern,
    match_rank_patterns,
    match_targets,
    parse_rank_patterns,
    parse_targets,
    rank_and_alpha,
    unused_rank_patterns,
)

NAMES = [
    "double_blocks.0.img_attn.qkv",
    "double_blocks.0.img_attn.proj",
    "double_blocks.0.txt_mlp.0",
    "double_blocks.1.img_attn.qkv",
    "single_blocks.0.linear1",
    "single_blocks.0.linear2",
]


def test_one_pattern_per_line_and_a_sign_excludes():
    text = "\n  double_blocks.*.img_attn.*  \n- *.proj\n!single_blocks.0.linear2\n\n"
    assert parse_targets(text) == (("double_blocks.*.img_attn.*",), ("*.proj", "single_blocks.0.linear2"))


def test_nothing_written_stands_for_the_defaults():
    assert parse_targets("") == ((), ())
    assert parse_targets(" \r\n \n") == ((), ())


def test_a_sign_alone_is_named_with_its_line():
    with pytest.raises(ValueError, match="Line 2 of targets is '-' with no pattern"):
        parse_targets("single_blocks.*\n-")


def test_include_less_exclude_in_the_model_s_order():
    assert match_targets(NAMES, ["single_blocks.*", "*.img_attn.*"], ["*.proj"]) == [
        "double_blocks.0.img_attn.qkv",
        "double_blocks.1.img_attn.qkv",
        "single_blocks.0.linear1",
        "single_blocks.0.linear2",
    ]


def test_a_name_is_matched_whole_and_case_matters():
    assert match_targets(NAMES, ["double_blocks.0.img_attn.qkv"], []) == ["double_blocks.0.img_attn.qkv"]
    for pattern in ("img_attn", "Single_blocks.*"):
        with pytest.raises(ValueError, match="matches no layer"):
            match_targets(NAMES, [pattern], [])


@pytest.mark.parametrize(("include", "exclude"), [(["*.qkv", "to_q*"], []), (["*.qkv"], ["to_q*"])])
def test_a_pattern_without_a_match_is_named_beside_three_names(include, exclude):
    with pytest.raises(ValueError) as raised:
        match_targets(NAMES, include, exclude)
    assert str(raised.value) == (
        "The pattern 'to_q*' in targets matches no layer of this model; its layers have names such as "
        "double_blocks.0.img_attn.qkv, double_blocks.1.img_attn.qkv, single_blocks.0.linear2."
    )


def test_excluding_everything_is_an_error():
    with pytest.raises(ValueError, match="targets excludes every layer that it includes"):
        match_targets(NAMES, ["*.img_attn.*"], ["double_blocks.*"])


def test_each_line_of_rank_patterns_changes_what_the_lines_before_left():
    lines = parse_rank_patterns("double_blocks.*: rank=8\n\n*.qkv: alpha=3\ndouble_blocks.1.*: rank=4 alpha=1")
    matching = match_rank_patterns(lines, NAMES)
    found = {name: rank_and_alpha(lines, numbers, (16, 16.0)) for name, numbers in matching.items()}
    assert list(found.values()) == [(8, 3.0), (8, 8.0), (8, 8.0), (4, 1.0), (16, 16.0), (16, 16.0)]
    with pytest.raises(ValueError, match=r"The pattern '\*\.x' in rank_patterns matches no layer that is trained"):
        match_rank_patterns([*lines, RankPattern("*.x", 4)], NAMES)


def unused_by_trying(lines, start, reads_alpha):
    """Each line is left out in turn, and all layers are compared."""

    def of_all(lines):
        matching = {name: [i for i, line in enumerate(lines) if fnmatchcase(name, line.pattern)] for name in NAMES}
        found = [rank_and_alpha(lines, numbers, start) for numbers in matching.values()]
        return found if reads_alpha else [rank for rank, _ in found]

    return [line for i, line in enumerate(lines) if of_all([*lines[:i], *lines[i + 1 :]]) == of_all(lines)]


def test_the_lines_that_change_nothing_are_those_that_can_be_left_out():
    chosen = random.Random(7)
    globs = ["*", "double_blocks.*", "single_blocks.*", "*.qkv", "*.linear1", "*.1.*"]
    for _ in range(400):
        lines = [
            RankPattern(chosen.choice(globs), rank, alpha)
            for rank, alpha in chosen.choices([(3, None), (16, None), (None, 16.0), (None, 0.7), (3, 3.0)], k=8)
        ]
        for reads_alpha in (True, False):
            found = unused_rank_patterns(lines, match_rank_patterns(lines, NAMES), (16, 16.0), reads_alpha)
            assert found == unused_by_trying(lines, (16, 16.0), reads_alpha), (lines, reads_alpha)


@pytest.mark.parametrize("own", [True, False], ids=["a_line_for_each_layer", "each_line_for_all_layers"])
def test_the_work_over_rank_patterns_is_linear_in_their_number(monkeypatch, own):
    calls = {"match": 0, "apply": 0}

    def counted(name, function):
        def call(*given):
            calls[name] += 1
            return function(*given)

        return call

    monkeypatch.setattr(patterns, "fnmatchcase", counted("match", fnmatchcase))
    monkeypatch.setattr(RankPattern, "applied", counted("apply", RankPattern.applied))
    layers = [f"blocks.{index}.linear" for index in range(100)]

    for count in (100, 200, 400):
        calls.update(match=0, apply=0)
        values = [(2 + index % 7, None) if index % 2 else (None, 1.0 + index) for index in range(count)]
        lines = [RankPattern(f"blocks.{i % 100}.*" if own else "*", *line) for i, line in enumerate(values)]
        unused_rank_patterns(lines, match_rank_patterns(lines, layers), (16, 16.0))
        assert calls["match"] == count * len(layers) and calls["apply"] <= 4 * count, (count, calls)


@pytest.mark.parametrize("digits", [4300, 10**5])
def test_a_number_of_very_many_digits_is_told_and_cut(digits):
    for line in (f"*: rank={'9' * digits}", f"*: alpha={'x' * digits}", "9" * digits):
        with pytest.raises(ValueError, match="rank_patterns (has the|is) ") as told:
            parse_rank_patterns(line)
        assert len(str(told.value)) < 260

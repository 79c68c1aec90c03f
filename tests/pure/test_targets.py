import pytest
from tessera.lora.patterns import match_targets, parse_targets

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

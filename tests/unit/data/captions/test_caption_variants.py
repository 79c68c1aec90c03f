"""The forms of captions: which there are, how likely each is, and what is told of them."""

import re
from collections import Counter
from itertools import permutations
from math import isclose

import pytest
from tessera.data.captions.notes import encoding_notes
from tessera.data.captions.options import CaptionOptions
from tessera.data.captions.variants import CaptionVariants, make_caption_variants
from tessera.data.folders.dataset import scan_images


def forms(text, trigger_words="", **options):
    variants = make_caption_variants(text, CaptionOptions(**options), trigger_words, "a.txt")
    assert len(variants.texts) == len(set(variants.texts)) == len(variants.weights) and isclose(
        sum(variants.weights), 1
    )
    return variants


def likely(text, trigger_words="", **options):
    """Each form with how likely it is, of captions whose forms are all taken."""
    variants = forms(text, trigger_words, **options)
    assert variants.possible == 0
    return {form: round(weight, 12) for form, weight in zip(variants.texts, variants.weights, strict=True)}


def wildcards(text, **options):
    return likely(text, wildcards=True, **options)


def test_caption_without_options_is_its_text_as_it_stands():
    text = "  a {red|blue} fox,\n\nb ,c ||| d\\{ "
    assert forms(text) == CaptionVariants((text.strip(),)) and forms(text).plain
    assert forms("", "ohwx, ").texts == ("ohwx",) and forms("a", " ohwx ").texts == ("ohwx, a",)


def test_each_alternative_of_a_wildcard_is_as_likely_as_its_others():
    assert wildcards("a {red|blue} fox") == {"a red fox": 0.5, "a blue fox": 0.5}
    assert wildcards("{a|b}{1|2|3|4}") == {f"{x}{y}": 0.125 for x in "ab" for y in "1234"}
    assert wildcards("{red|red|red|blue} fox") == {"red fox": 0.75, "blue fox": 0.25}
    assert wildcards("no wildcard") == {"no wildcard": 1}


def test_wildcards_nest_may_be_empty_and_can_be_written_as_text():
    assert wildcards("{a|{b|c} d}") == {"a": 0.5, "b d": 0.25, "c d": 0.25}
    assert wildcards("fox{| in snow}") == {"fox": 0.5, "fox in snow": 0.5}
    assert wildcards("{only} {}x|y") == {"only x|y": 1}
    assert wildcards(r"\{a\|b\} {c\|d|\}} e\f") == {r"{a|b} c|d e\f": 0.5, r"{a|b} } e\f": 0.5}
    assert wildcards("{a|b\nc}") == {"a": 0.5, "b\nc": 0.5}


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a {b|c", {}, r"The caption file 'a.txt' has in line 1, column 3 a '\{' without a '\}' after it; add one, or"),
        ("\n\n a\n{b|{c} d", {}, r"in line 4, column 1 a '\{' without"),
        ("a\n b} {c}", {}, r"in line 2, column 3 a '\}' without a '\{' before it; add one, or write \\\} for the sign"),
        ("{a|b}\n{c|d", {"caption_per_line": True}, r"in line 2, column 1 a '\{' without.*, or switch wildcards off"),
        ("{a\nb}", {"caption_per_line": True}, r"in line 1, column 1 a '\{' without"),
        ("{" * 60 + "}" * 60, {}, r"in line 1, column 51 a '\{' within 50 others; use fewer"),
    ],
)
def test_braces_without_a_partner_are_told_with_their_place(text, options, message):
    with pytest.raises(ValueError, match=message):
        forms(text, wildcards=True, **options)


def test_each_line_may_be_a_caption_as_likely_as_the_others_whatever_its_forms():
    text = "one\n\n  two\t\n{a|b|c|d}\n"
    assert likely(text, caption_per_line=True) == {"one": 0.333333333333, "two": 0.333333333333} | {
        "{a|b|c|d}": 0.333333333333
    }
    expected = {"one": 0.333333333333, "two": 0.333333333333} | dict.fromkeys("abcd", 0.083333333333)
    assert likely(text, caption_per_line=True, wildcards=True) == expected
    assert likely("\n \n", caption_per_line=True) == {"": 1}
    assert likely("same\nsame\nother", "x", caption_per_line=True) == {
        "x, same": 0.666666666667,
        "x, other": 0.333333333333,
    }


def test_tags_come_in_every_order_behind_those_that_are_kept():
    assert likely("a,b ,  c", shuffle_tags=True) == dict.fromkeys(
        (", ".join(order) for order in permutations("abc")), 0.166666666667
    )
    assert likely("a, b, c", "ohwx, sks", shuffle_tags=True, keep_tokens=1) == {
        "ohwx, sks, a, b, c": 0.5,
        "ohwx, sks, a, c, b": 0.5,
    }
    assert likely("a, b", shuffle_tags=True, keep_tokens=9) == {"a, b": 1}
    assert likely("a, b ||| c, d ||| e", shuffle_tags=True, keep_tokens=3) == {
        "a, b, c, d, e": 0.5,
        "a, b, d, c, e": 0.5,
    }
    assert likely("a # b, c", shuffle_tags=True, keep_tokens_separator=" # ") == {"a, b, c": 0.5, "a, c, b": 0.5}
    assert likely("a, b, , a", shuffle_tags=True)["a, b, a"] == 0.333333333333


def test_each_free_tag_is_left_out_by_its_chance_and_no_kept_one():
    assert likely("a, b, c", "ohwx", tag_dropout=0.25, keep_tokens=1) == {
        "ohwx, a, b, c": 0.5625,
        "ohwx, a, b": 0.1875,
        "ohwx, a, c": 0.1875,
        "ohwx, a": 0.0625,
    }
    assert likely("b, c", tag_dropout=0.5, shuffle_tags=True) == {
        "b, c": 0.125, "c, b": 0.125, "b": 0.25, "c": 0.25, "": 0.25,
    }  # fmt: skip


def test_tags_of_a_wildcard_are_shuffled_after_it_is_chosen():
    assert likely("{a, b|c}", wildcards=True, shuffle_tags=True) == {"a, b": 0.25, "b, a": 0.25, "c": 0.5}


def test_forms_are_drawn_as_many_as_variants_all_different_and_the_same_each_time():
    text = "{a|b|c|d|e} {1|2|3|4|5}"
    eight = forms(text, wildcards=True)
    assert len(eight.texts) == 8 and set(eight.weights) == {0.125} and eight.possible == 25
    assert forms(text, wildcards=True) == eight
    assert forms(text, wildcards=True, caption_variants=12).texts[:8] == eight.texts
    assert all(re.fullmatch("[a-e] [1-5]", form) for form in eight.texts)
    assert forms("f" + text, wildcards=True).texts != tuple("f" + form for form in eight.texts)
    tags = forms(", ".join(map(str, range(40))), shuffle_tags=True, caption_variants=24)
    assert sum(weight > 0 for weight in tags.weights) == 24 and tags.possible == 1000
    assert all(sorted(form.split(", ")) == sorted(map(str, range(40))) for form in tags.texts)
    nearly = forms("a, b, c", shuffle_tags=True, caption_variants=5)
    assert sum(weight > 0 for weight in nearly.weights) == 5 and nearly.possible == 6


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle_tags": True},
        {"tag_dropout": 0.4},
        {"shuffle_tags": True, "tag_dropout": 0.4, "keep_tokens": 1},
        {"shuffle_tags": True, "tag_dropout": 0.1, "keep_tokens": 1, "caption_variants": 8},
    ],
)
def test_the_first_form_of_tags_is_the_caption_as_written_and_as_likely_as_it_was_drawn(options):
    for number in range(20):
        caption = f"n{number}, red, hat, tree, sky, dog, cat"
        variants = forms(caption, "ohwx", **options)
        assert variants.texts[0] == f"ohwx, {caption}"
        assert all(weight for weight in variants.weights[1:])
        assert isclose(
            variants.weights[0] * 8, round(variants.weights[0] * 8), abs_tol=1e-9
        )  # as often as it was drawn
    picked = forms("{red|blue}, {a|b|c}, d, e, f, g", wildcards=True, shuffle_tags=True)
    assert re.fullmatch("(red|blue), [abc], d, e, f, g", picked.texts[0])


def pooled(text, count=500, **options):
    """Count how often each form is shown over captions that differ in a first word, which is cut off."""
    shares = Counter()
    for number in range(count):
        variants = forms(f"n{number} {text}", **options)
        for form, weight in zip(variants.texts, variants.weights, strict=True):
            shares[form.partition(" ")[2]] += weight / count
    return shares


def test_drawn_forms_are_on_the_whole_as_likely_as_they_should_be():
    """Bounds are five standard deviations of the 4000 draws (500 captions of 8)."""

    def near(share, chance):
        assert abs(share - chance) < 5 * (chance * (1 - chance) / 4000) ** 0.5, (share, chance)

    shares = pooled("||| a, b, c, d, e", tag_dropout=0.2, shuffle_tags=True)
    for tag in "abcde":
        near(sum(share for form, share in shares.items() if tag in form), 0.8)
    near(sum(share for form, share in shares.items() if form.startswith("a, ")), (1 - 0.2**5) / 5 - 0.8 * 0.2**4)
    near(sum(share for form, share in shares.items() if len(form.split(", ")) == 5), 0.8**5)
    # Forms that come up often count as often, whether by dropout or by nesting.
    near(pooled("||| a, b, c, d, e, f", tag_dropout=0.1)["a, b, c, d, e, f"], 0.9**6)
    shares = pooled("{x|{1|2|3|4|5|6|7|8|9}}", wildcards=True)
    near(shares["x"], 0.5)
    near(shares["7"], 0.5 / 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"caption_dropout": 1.5}, r"caption_dropout is 1.5; set it between 0 and 1"),
        ({"caption_dropout": float("nan")}, r"caption_dropout is nan; give a finite number"),
        ({"tag_dropout": 1.0}, r"tag_dropout is 1; set it to 0 or more and below 1"),
        ({"keep_tokens": -1}, r"keep_tokens is -1; set it to 0 or more"),
        ({"keep_tokens_separator": ", "}, r"keep_tokens_separator is ', ', but commas separate tags; set"),
        ({"caption_variants": 0}, r"caption_variants is 0; set it between 1 and 1000"),
        (
            {"caption_variants": 1, "shuffle_tags": True, "wildcards": True},
            r"caption_variants is 1, so shuffle_tags and wildcards would always show the same version of each caption;",
        ),
        (
            {"caption_dropout": 1.0, "tag_dropout": 0.1, "caption_per_line": True},
            r"caption_dropout is 1, so no caption is ever shown and tag_dropout and caption_per_line can do nothing;",
        ),
    ],
)
def test_options_that_contradict_each_other_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        CaptionOptions(**options)


def test_captions_that_are_never_shown_are_empty_and_leave_no_place_for_trigger_words():
    assert forms("a {b", caption_dropout=1.0) == CaptionVariants(("",))
    with pytest.raises(ValueError, match=r"caption_dropout is 1, so the trigger_words would never be shown; lower"):
        forms("a", "ohwx", caption_dropout=1.0)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()

    def scan(*captions, **options):
        for file in folder.iterdir():
            file.unlink()
        for number, caption in enumerate(captions):
            (folder / f"{number}.png").touch()
            (folder / f"{number}.txt").write_text(caption)
        return scan_images(folder, captions=CaptionOptions(**options))

    return scan


def test_pictures_carry_the_forms_of_their_captions(folder):
    dataset = folder("{a|b}", "c", wildcards=True, caption_dropout=0.1)
    assert [(p.caption, p.variants.texts, p.variants.dropout) for p in dataset.entries] == [
        ("a", ("a", "b"), 0.1),
        ("c", ("c",), 0.1),
    ]
    assert not dataset.notes
    with pytest.raises(ValueError, match=r"The caption file '1.txt' has in line 1, column 1 a '\{' without"):
        folder("a", "{b", wildcards=True)


@pytest.mark.parametrize(
    ("captions", "options", "note"),
    [
        (
            ["a, b, c, d", "a", ", ".join("abcdefghij")],
            {"shuffle_tags": True},
            "These captions have more variants than caption_variants allows, so some were picked at random: 0.png (8 "
            "of 24), 2.png (8 of 1000 or more).",
        ),
        (["a ||| b"], {}, "Captions of 'photos' hold '|||', which is plain text as long as shuffle_tags and"),
        (
            ["a fox in snow. It runs, fast", "a, b, 1.5 m, Mr. ", f"a, {'word ' * 12}", f"a, {'word ' * 11}"],
            {"tag_dropout": 0.1, "caption_variants": 999},
            "Some captions of 'photos' look like sentences, but tag_dropout treats the parts between commas as tags: "
            "0.png, 2.png; switch it off for them.",
        ),
    ],
)
def test_surprises_and_drawn_forms_are_noted(folder, captions, options, note):
    (text,) = folder(*captions, **options).notes
    assert text.startswith(note)


def test_the_note_on_encoding_counts_texts_and_bytes():
    plain, several = CaptionVariants(("a",)), CaptionVariants(("a", "b"), (0.5, 0.5), dropout=0.07)
    assert list(encoding_notes([plain, plain], {"x": 4})) == []
    assert list(encoding_notes([plain, several], {"x": 4_000_000, "y": 4_000_000, "z": 8_000_000})) == [
        "The 2 captions have up to 2 forms each: 3 texts, each encoded once, about 0.016 GB on disk. The empty prompt "
        "takes a caption's place in 0 to 7 % of showings."
    ]

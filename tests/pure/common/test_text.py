"""Values of strangers in messages."""

import pytest
from tessera.common.text import cut, one_of, quantity, quoted, shortlist


def test_a_short_value_is_quoted_as_it_is():
    values = ("fox", 1.5, ["a", None], float("nan"))
    assert list(map(quoted, values)) == ["'fox'", "1.5", "['a', None]", "nan"]
    assert cut("x" * 100) == "x" * 100


def test_a_long_value_is_cut():
    for value in ("a" * 10**6, "\0" * 10**6, ["a" * 200], 10**200, 10**5000, [10**5000], -(10**5000)):
        assert 20 < len(quoted(value)) <= 2 + 4 * 101


def test_the_ends_of_a_long_text_stay():
    assert quoted("begin" + "x" * 10**6 + "end").startswith("'beginx")
    assert quoted("begin" + "x" * 10**6 + "end").endswith("…" + "x" * 27 + "end'")


def test_names_in_a_list_and_unknown_choices_are_cut():
    assert len(shortlist(["a" * 10**6] * 9)) < 600
    with pytest.raises(ValueError, match="flip is 'aaa.*…a*'; choose one of off, on") as error:
        one_of("flip", "a" * 10**6, ("off", "on"))
    assert len(str(error.value)) < 200


def test_a_count_agrees_with_its_noun_and_verb():
    assert [quantity(count, "folder") for count in (0, 1, 2000)] == ["0 folders", "1 folder", "2,000 folders"]
    counts = [quantity(count, "copy is", "copies are") for count in (0, 1, 2)]
    assert counts == ["0 copies are", "1 copy is", "2 copies are"]

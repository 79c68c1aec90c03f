"""Bounded reading: JSON, names with *, regular files, folders without links, and pixels that are decoded at once."""

import gc
import json
import os
import random
import re
import threading
from pathlib import Path

import pytest
from tessera.common.untrusted import budgets
from tessera.common.untrusted.budgets import Budget, OverBudget, check_size
from tessera.common.untrusted.folders import folder_below
from tessera.common.untrusted.in_flight import PixelGate
from tessera.common.untrusted.json_text import depth_of, finite_json, parse_json, read_json
from tessera.common.untrusted.patterns import name_matcher
from tessera.common.untrusted.regular_files import append_regular, is_regular, open_regular

POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes in folders, and links need rights")
SMALL = Budget("a test", "it is small", "write less", bytes=100, items=10, depth=3)
PAGE = Path(__file__).parents[3] / "docs" / "untrusted_files.md"


# JSON


def test_json_within_its_budget_is_read_as_python_reads_it():
    for value in ({"a": [1, {"b": None}]}, [], "text", 1.5, ["[[[[", '"{', "\\"]):
        assert parse_json(json.dumps(value), SMALL, "x.json") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1" * 101, "x.json has 101 bytes .at most 100., more than a test may have; write less."),
        ("[" + "1," * 11 + "1]", "x.json has 12 entries .at most 10., more than a test may have; write less."),
        ("[[[[]]]]", "x.json has 4 levels .at most 3., more than a test may have; write less."),
        ("[],[],[],[],[],[],", "x.json has 12 entries"),
    ],
)
def test_json_past_its_budget_is_refused_before_it_is_parsed(text, message):
    with pytest.raises(OverBudget, match=message):
        parse_json(text, SMALL, "x.json")


def test_depth_counts_brackets_outside_of_strings_only():
    assert depth_of('["[[[[", {"a\\"[[": [1]}]') == 3
    assert depth_of("no bracket") == 0 and depth_of('"unfinished [[[') == 0
    assert depth_of('[{"a\\\\": [[]]}]') == 4 and depth_of(r'["\\\"[[", []]') == 2  # escaped backslashes and quotes
    assert depth_of("[" * 2500 + "]" * 2500) == 2500 and depth_of("[]" * 2500) == 1


def test_depth_ends_soon_past_its_bound():
    assert 3 < depth_of("[" * 1_000_000, 3) <= 1000


def test_numbers_that_no_browser_reads_become_null():
    assert parse_json("[1e999, -1e999, NaN, Infinity, 1.5]", SMALL, "x") == [None, None, None, None, 1.5]
    assert finite_json({"a": [float("inf"), (float("nan"), 2)]}) == {"a": [None, [None, 2]]}


def test_collector_rests_while_json_is_parsed(monkeypatch):
    """Of 6 MB of small lists it took 3 s in which nothing else ran, in place of 0.4 s."""
    states = []
    monkeypatch.setattr(json, "loads", lambda *_, **__: states.append(gc.isenabled()))
    parse_json("[]", SMALL, "x")
    assert states == [False] and gc.isenabled()


# Patterns


def test_names_with_stars_match_as_a_regular_expression_would():
    draw = random.Random(0)
    for _ in range(3000):
        pattern = "".join(draw.choices("ab*?[", k=draw.randrange(7)))
        name = "".join(draw.choices("ab?[]", k=draw.randrange(9)))
        expected = re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name, re.DOTALL)
        assert bool(name_matcher(pattern, "loras").match(name)) == bool(expected), (pattern, name)


def test_a_name_of_many_stars_does_not_freeze():
    name = "a" * 58
    assert not name_matcher("**********x", "loras").match(name)
    assert name_matcher("*" * 100 + "x", "loras").match("fox")  # a run of them counts as one
    assert not name_matcher("*a" * 16 + "x", "loras").match("a" * 5000)
    with pytest.raises(OverBudget, match="loras has 17 entries .at most 16."):
        name_matcher("*a" * 17, "loras")


# Files and folders


@POSIX
def test_a_pipe_is_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe is no regular file; remove it"):
        open_regular(tmp_path / "pipe")
    assert not is_regular(tmp_path / "pipe") and not is_regular(tmp_path) and not is_regular(Path("a\0b"))
    with pytest.raises(OSError, match="no regular file"):
        read_json(tmp_path / "pipe", SMALL)


@POSIX
def test_text_is_appended_to_regular_files_only(tmp_path):
    with append_regular(tmp_path / "a.txt") as file:
        file.write("a")
    assert (tmp_path / "a.txt").read_text() == "a"
    with pytest.raises(OSError, match="null is no regular file; remove it"):
        append_regular(Path(os.devnull))


@POSIX
def test_a_link_is_followed_only_where_it_may_be(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "link").symlink_to(tmp_path / "a.txt")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"a"
    with pytest.raises(OSError, match="link"):
        open_regular(tmp_path / "link", follow_links=False)


def test_a_file_past_its_budget_is_refused_before_it_is_read(tmp_path):
    file = tmp_path / "a.json"
    file.touch()
    os.truncate(file, 1 << 40)  # no memory holds as much
    with pytest.raises(OverBudget, match="a.json has 1,099,511,627,776 bytes"):
        read_json(file, SMALL)


def test_a_file_that_grows_past_its_budget_is_refused(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("1" * 200)
    with pytest.raises(OverBudget, match="a.json has 200 bytes"):
        read_json(file, SMALL)


def test_files_move_between_open_folders(tmp_path):
    (tmp_path / "from" / "in").mkdir(parents=True)
    (tmp_path / "from" / "in" / "a.txt").write_text("a")
    with (
        folder_below(tmp_path, Path("from/in")) as source,
        folder_below(tmp_path / "to", Path("x/y"), make=True) as target,
    ):
        source.move("a.txt", target)
        assert target.contains("a.txt") and not source.contains("a.txt")
        with pytest.raises(FileExistsError):
            target.move("a.txt", target)
    assert (tmp_path / "to" / "x" / "y" / "a.txt").read_text() == "a"


@POSIX
def test_links_below_a_root_are_not_followed(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    root.mkdir()
    (root / "link").symlink_to(outside)
    for make in (False, True):
        with pytest.raises(OSError), folder_below(root, Path("link"), make):
            raise AssertionError
        with pytest.raises(OSError), folder_below(root, Path("link/inner"), make):
            raise AssertionError
    assert not list(outside.iterdir())
    linked = tmp_path / "linked"
    linked.symlink_to(root)  # the way to the root is the user's own
    with folder_below(linked, Path("new"), make=True):
        pass
    assert (root / "new").is_dir()


# Pixels


def test_pictures_wait_for_room_and_a_large_one_goes_alone():
    gate = PixelGate(100)
    levels = []
    finished = []

    def decode(pixels):
        with gate.decoding(pixels):
            levels.append(gate.in_flight)
        finished.append(pixels)

    threads = [threading.Thread(target=decode, args=(pixels,)) for pixels in (60, 60, 40, 250, 10, 100)]
    with gate.decoding(100):
        for thread in threads:
            thread.start()
        assert finished == [] and gate.in_flight == 100
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(finished) == [10, 40, 60, 60, 100, 250] and gate.in_flight == 0
    assert max(size for size in levels if size != 250) <= 100


# The table


def test_every_budget_says_why_and_what_to_do_and_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    assert len(budgets.ALL) > 15
    for budget in budgets.ALL:
        assert budget.bounds() and budget.reason and budget.remedy
        assert budget.table_row() in page, budget.source


def test_a_size_is_checked_by_the_bound_of_its_unit():
    check_size(SMALL, "x", bytes=100, items=10)
    with pytest.raises(OverBudget, match="x has 11 entries"):
        check_size(SMALL, "x", bytes=100, items=11)

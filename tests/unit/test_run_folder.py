from datetime import datetime
from unicodedata import normalize

import pytest
from tessera.common.file_names import LONGEST_NAME, plain_name
from tessera.nodes.common.dates import fill_in_dates
from tessera.nodes.loras.save import checked_prefix
from tessera.train.checkpoint.run_folder import RunFolder, run_folders
from tiny.runs import run_settings


@pytest.mark.parametrize("name", ["my_lora", "styles/my lora (2)", "Füchse-v1.5+", "n" * LONGEST_NAME])
def test_plain_names_are_taken(name):
    assert plain_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "हिन्दी",
        "ที่นี่",
        "лора",
        "日本・語",
        "می‌خواهم",
        "müller's",
        "a, b & c",
        "v1.0 [final]",
        "name@home #2",
        "50% to 60%",
        "😀",
    ],
)
def test_names_of_every_script_and_harmless_signs_are_taken_and_make_a_folder(name, tmp_path):
    assert plain_name(name) == name
    (tmp_path / f"{name}-0123abcd").mkdir()
    assert [folder.name for folder in run_folders(tmp_path, name)] == [name]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("a\\b", "a/b"),
        (" lead", "lead"),
        ("trail \n", "trail"),
        ("styles / my lora ", "styles/my lora"),
        ("lora.safetensors", "lora"),
        ("styles/Lora.SAFETENSORS ", "styles/Lora"),
        (normalize("NFD", "café"), "café"),
    ],
)
def test_what_a_name_has_around_it_is_taken_off(given, name):
    assert plain_name(given) == name and plain_name(name) == name
    assert run_settings(output_name=given).output_name == name


@pytest.mark.parametrize(
    "name",
    ["", "..", "a/../b", "/etc/x", "C:\\x", "a//b", ".", "a/", "nul", "con.v1", "x/COM1", " ", ".safetensors", "../x "],
)
def test_names_that_lead_elsewhere_or_nowhere_are_refused(name):
    with pytest.raises(ValueError, match="output_name is .* use a plain name"):
        plain_name(name)


@pytest.mark.parametrize(
    ("name", "called"),
    [("a:b", r"':' \(colon\)"), ("a?", "question mark"), ("a\tb", r"U\+0009"), ("a\u202eb", "right-to")],
)
def test_the_character_that_is_not_taken_is_named(name, called):
    with pytest.raises(ValueError, match=called):
        plain_name(name)


def test_a_date_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="dates .* don't work here, since a run is found again by its name"):
        plain_name("lora %date:yyyy-MM-dd%")


def test_a_name_that_no_disk_takes_is_refused_before_training():
    with pytest.raises(ValueError, match=f"at most {LONGEST_NAME}"):
        plain_name("styles/" + "n" * (LONGEST_NAME + 1))


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="output_name: the run's folder cannot be written"):
        RunFolder(tmp_path / "file" / "run", "run").check_writable()


def test_looking_whether_a_folder_can_be_written_leaves_nothing(tmp_path):
    RunFolder(tmp_path / "run", "run").check_writable()
    assert not list(tmp_path.iterdir())


def test_the_newest_states_are_kept_also_past_a_million_steps(tmp_path):
    folder = RunFolder(tmp_path, "run")
    for step in (999_500, 999_750, 1_000_000):
        (tmp_path / f"state-{step:06d}.tessera").write_text("state")
    folder.remove_old_states(10**9)
    assert [path.name for path in folder.states()] == ["state-999750.tessera", "state-1000000.tessera"]


def test_a_run_that_went_on_from_an_early_state_keeps_what_it_saves_and_what_lay_ahead(tmp_path):
    folder = RunFolder(tmp_path, "run")
    for step in (100, 250, 300, 500, 750):
        (tmp_path / f"state-{step:06d}.tessera").write_text("state")
    folder.remove_old_states(300)
    assert [path.name[6:12] for path in folder.states()] == ["000250", "000300", "000500", "000750"]
    folder.remove_old_states(750, resumed_from=tmp_path / "state-000300.tessera")
    assert [path.name[6:12] for path in folder.states()] == ["000300", "000500", "000750"]


def test_a_run_is_found_by_its_whole_name(tmp_path):
    others = ("face-v2-0123abcd", "face-v2-0123abcd-2", "face-0123abc", "face-0123abcd-old", "face2-0123abcd")
    own = ("face-0123abcd", "face-0123abcd-2", "face-89abcdef")
    for name in (*others, *own):
        (tmp_path / name).mkdir()
    assert [folder.path.name for folder in run_folders(tmp_path, "face")] == list(own)
    assert [folder.path.name for folder in run_folders(tmp_path, "face", "0123abcd" + "0" * 32)] == list(own[:2])
    assert not run_folders(tmp_path, "absent/face")


def test_a_name_that_reads_as_a_pattern_is_a_name(tmp_path):
    (tmp_path / "v[1]-0123abcd").mkdir()
    (tmp_path / "v1-0123abcd").mkdir()
    assert [folder.path.name for folder in run_folders(tmp_path, "v[1]")] == ["v[1]-0123abcd"]


def test_dates_in_the_prefix_of_save_lora_are_filled_in_as_the_browser_does_it_for_save_image():
    now = datetime(2026, 3, 7, 4, 5, 9)
    text = "%date:yyyy-MM-dd% %date:yy.M.d% %date:hhmmss%/%date:h-m-s%"
    assert fill_in_dates(text, now) == "2026-03-07 26.3.7 040509/4-5-9"
    assert fill_in_dates("%date% %year% 5%", now) == "%date% %year% 5%"
    assert checked_prefix(" loras/%date:yyyy%/x.safetensors ") == f"loras/{datetime.now():%Y}/x"
    with pytest.raises(ValueError, match="filename_prefix is .* give a name inside"):
        checked_prefix("loras/%date:hh:mm%")

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from unicodedata import normalize

import pytest
from tessera.common.file_names import LONGEST_NAME, plain_name
from tessera.common.files import MACHINE
from tessera.nodes.common.dates import fill_in_dates
from tessera.nodes.loras.save import checked_prefix
from tessera.train.checkpoint.resume import find_state, list_states
from tessera.train.runs.run_folder import RunFolder, open_folder, run_folders
from tessera.train.runs.run_record import RunReader
from tiny.train.runs import run_settings

KEY, OTHER = "a" * 40, "b" * 40


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
    (tmp_path / f"{name} (001)").mkdir()
    assert [folder.name for folder in run_folders(tmp_path, name)] == [name]


@pytest.mark.parametrize(
    ("text", "name"),
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
def test_spaces_around_a_name_are_taken_off(text, name):
    assert plain_name(text) == name and plain_name(name) == name
    assert run_settings(output_name=text).output_name == name


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
    for is_new in (True, False):
        with pytest.raises(ValueError, match="output_name: the run's folder cannot be written"):
            RunFolder(tmp_path / "file" / "run (001)", "run", is_new).create()
    assert (tmp_path / "file").is_file()


def test_a_new_run_takes_its_folder_and_leaves_nothing_else_in_it(tmp_path):
    folder = open_folder(tmp_path, "styles/face", KEY, None)
    assert folder.is_new and not list(tmp_path.iterdir())
    new_folder = folder.create()
    assert new_folder == RunFolder(tmp_path / "styles" / "face (001)", "face") and not list(new_folder.path.iterdir())
    assert new_folder.create() == new_folder and not list(new_folder.path.iterdir())


def test_the_number_of_a_deleted_folder_is_not_given_again(tmp_path):
    """ComfyUI would show the LoRA of that name that it has in memory."""
    for number in (1, 2, 3):
        new_folder = open_folder(tmp_path, "face", KEY, None).create()
        assert new_folder.path.name == f"face (00{number})"
        new_folder.path.rmdir()
    assert open_folder(tmp_path, "other", KEY, None).path.name == "other (001)"


def test_the_number_of_a_run_in_the_trash_is_not_given_again_by_another_process(tmp_path):
    """That of a server that was restarted, or one that trains for it."""
    for place in ("2026-11-23/styles/face (004)", "2026-11-24 (2)/styles/face (002)", "2026-11-23/face (009)"):
        (tmp_path / ".tessera-trash" / place).mkdir(parents=True)
    assert open_folder(tmp_path / "loras", "styles/face", KEY, None).path.name == "face (005)"
    assert open_folder(tmp_path / "loras", "styles/other", KEY, None).path.name == "other (001)"


def test_a_folder_whose_longest_file_does_not_fit_is_refused_before_training(tmp_path, monkeypatch):
    """As Windows does it past 260 letters: the LoRA of a step has the longest path."""
    folder, touch = open_folder(tmp_path, "face", KEY, None), Path.touch

    def short(path, **options):
        if path.parent.name == "face_steps":
            raise FileNotFoundError(2, "too long", str(path))
        touch(path, **options)

    monkeypatch.setattr(Path, "touch", short)
    with pytest.raises(ValueError, match="output_name: the run's folder cannot be written"):
        folder.create()
    assert not list(tmp_path.iterdir())


def test_runs_take_different_folders_however_many_begin_at_once(tmp_path):
    planned = [open_folder(tmp_path, "face", KEY, None) for _ in range(40)]
    assert len(set(planned)) == 1
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(RunFolder.create, planned))
    assert sorted(folder.path.name for folder in folders) == [f"face ({number:03})" for number in range(1, 41)]


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
    other_names = (
        "face-0123abcd",
        "face (1)",
        "face (001) (001)",
        "face (001) copy",
        "face2 (001)",
        "Face (001)",
        "face(001)",
        "face (01a)",
    )
    own_names = ("face (001)", "face (007)", "face (999)", "face (1000)")
    for name in (*other_names, *own_names):
        (tmp_path / name).mkdir()
    (tmp_path / "face (008)").write_text("no folder")
    assert [folder.path.name for folder in run_folders(tmp_path, "face")] == list(own_names)
    assert not run_folders(tmp_path, "absent/face")
    assert open_folder(tmp_path, "face", KEY, None).path.name == "face (1001)"


def test_the_key_in_the_folder_tells_the_run(tmp_path):
    keys = {"face (001)": KEY, "face (002)": OTHER, "face (003)": ""}
    for name, key in keys.items():
        (tmp_path / name).mkdir()
        if key:
            (tmp_path / name / "run.json").write_text(json.dumps({"key": key}))
    (tmp_path / "face (004)").mkdir()
    (tmp_path / "face (004)" / "run.json").write_text("{broken")

    def folders_of(key):
        return [folder.path.name for folder in run_folders(tmp_path, "face", key)]

    assert folders_of(KEY) == ["face (001)"] and folders_of(OTHER) == ["face (002)"] and folders_of(KEY[:8]) == []
    (tmp_path / "face (002)" / "run.json").write_text(json.dumps({"key": KEY}))  # as long as it was
    assert folders_of(KEY) == ["face (001)", "face (002)"]


def test_an_unchanged_folder_is_read_once(tmp_path, monkeypatch):
    for number in range(50):
        (tmp_path / f"face ({number + 1:03})").mkdir()
        (tmp_path / f"face ({number + 1:03})" / "run.json").write_text(json.dumps({"key": KEY}))
    read, facts = [], RunReader.facts
    monkeypatch.setattr(RunReader, "facts", lambda reader: read.append(reader.folder) or facts(reader))
    for times in (50, 50):
        assert len(run_folders(tmp_path, "face", KEY)) == 50 and len(read) == times


def test_a_run_goes_on_in_its_folder_and_one_that_another_machine_may_be_at_gets_its_own(tmp_path):
    folder = open_folder(tmp_path, "face", KEY, None).create()
    facts = {"key": KEY, "machine": MACHINE}
    (folder.path / "run.json").write_text(json.dumps(facts))
    assert open_folder(tmp_path, "face", KEY, None) == folder  # killed before its first save
    assert open_folder(tmp_path, "face", OTHER, None).path.name == "face (002)"
    (folder.path / "run.json").write_text(json.dumps(facts | {"machine": "0" * 8}))
    assert open_folder(tmp_path, "face", KEY, None).path.name == "face (002)"
    state = folder.path / "state-000001.tessera"
    state.write_text("state")
    assert open_folder(tmp_path, "face", KEY, state) == folder
    assert open_folder(tmp_path, "face", OTHER, state).path.name == "face (002)"


def test_states_are_found_and_none_outside(tmp_path):
    root = tmp_path / "loras"
    places = ("styles/face (001)", "copied from my laptop", "styles/face (002)")
    for place in places:
        (root / place).mkdir(parents=True)
        (root / place / "state-000003.tessera").write_text("state")
    (root / "styles/face (002)" / "notes.txt").write_text("no state")
    for place in places:
        name = f"{place}/state-000003.tessera"
        assert find_state(root, name) == root / name and name in list_states(root)
    (tmp_path / "state-000003.tessera").write_text("outside")
    (root / "link").symlink_to(tmp_path)
    for name in (
        "styles/face (001)/state-000004.tessera",
        "face (001)/state-000003.tessera",
        "../state-000003.tessera",
        "link/state-000003.tessera",
        f"{tmp_path}/state-000003.tessera",
        "../loras/../x (001)/state-000003.tessera",
        "styles/face (002)/notes.txt",
        "styles/face (002)",
        "a\0b/state-000003.tessera",
        "x" * 5000 + "/state-000003.tessera",
        "",
    ):
        assert find_state(root, name) is None, name


def test_the_loras_of_steps_lie_in_a_folder_of_their_own(tmp_path):
    folder = RunFolder(tmp_path / "face (001)", "face")
    assert folder.step_loras() == {}
    first, second = folder.step_lora_path(2), folder.step_lora_path(4)
    assert second.relative_to(folder.path).as_posix() == "face_steps/face-step000004.safetensors"
    second.parent.mkdir(parents=True)
    for path in (first, second, second.with_name("other-step000003.safetensors"), folder.path / second.name):
        path.write_text("lora")
    assert folder.step_loras() == {2: first, 4: second}
    folder.remove_old_loras(4, 1)
    assert folder.step_loras() == {4: second}


def test_a_name_that_reads_as_a_pattern_is_a_name(tmp_path):
    (tmp_path / "v[1] (001)").mkdir()
    (tmp_path / "v1 (001)").mkdir()
    assert [folder.path.name for folder in run_folders(tmp_path, "v[1]")] == ["v[1] (001)"]


def test_dates_in_the_prefix_of_save_lora_are_filled_in_as_the_browser_does_it_for_save_image():
    moment = datetime(2026, 3, 7, 4, 5, 9)
    text = "%date:yyyy-MM-dd% %date:yy.M.d% %date:hhmmss%/%date:h-m-s%"
    assert fill_in_dates(text, moment) == "2026-03-07 26.3.7 040509/4-5-9"
    assert fill_in_dates("%date% %year% 5%", moment) == "%date% %year% 5%"
    assert checked_prefix(" loras/%date:yyyy%/x.safetensors ") == f"loras/{datetime.now():%Y}/x"
    with pytest.raises(ValueError, match="filename_prefix is .* give a name inside"):
        checked_prefix("loras/%date:hh:mm%")

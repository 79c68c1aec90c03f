import pytest
from tessera.train.run import LONGEST_NAME, RunFolder, check_output_name, run_folders


@pytest.mark.parametrize("name", ["my_lora", "styles/my lora (2)", "Füchse-v1.5+", "a\\b", "n" * LONGEST_NAME])
def test_plain_names_are_taken(name):
    check_output_name(name)


@pytest.mark.parametrize("name", ["", "..", "a/../b", "/etc/x", "C:\\x", "a//b", ".", "a/", "nul", "con.v1", "x/COM1"])
def test_names_that_lead_elsewhere_or_nowhere_are_refused(name):
    with pytest.raises(ValueError, match="output_name is .* use a plain name"):
        check_output_name(name)


def test_a_name_that_no_disk_takes_is_refused_before_training():
    with pytest.raises(ValueError, match=f"at most {LONGEST_NAME}"):
        check_output_name("styles/" + "n" * (LONGEST_NAME + 1))


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
    folder.forget_old_states(10**9)
    assert [path.name for path in folder.states()] == ["state-999750.tessera", "state-1000000.tessera"]


def test_a_run_that_went_on_from_an_early_state_keeps_what_it_saves_and_what_lay_ahead(tmp_path):
    folder = RunFolder(tmp_path, "run")
    for step in (100, 250, 300, 500, 750):
        (tmp_path / f"state-{step:06d}.tessera").write_text("state")
    folder.forget_old_states(300)
    assert [path.name[6:12] for path in folder.states()] == ["000250", "000300", "000500", "000750"]


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

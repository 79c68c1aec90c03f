"""Runs of all names in one list, and runs that are moved to the trash and back."""

import errno
import json
import os
import shutil
import time
from pathlib import Path
from unicodedata import normalize

import pytest
from tessera.nodes.train.run_index import RunIndex, page_of
from tessera.train.runs import run_trash
from tessera.train.runs.run_folder import RunFolder, all_runs
from tessera.train.runs.run_trash import deleted_runs, move_to_trash, own_files, remove_for_good, restore

LINKS = pytest.mark.skipif(os.name == "nt", reason="links need rights")
DAY = "2026-11-24"


def make_run(root, place, name, **facts):
    """A run as this version writes it."""
    folder = root / place
    (folder / f"{name}_steps").mkdir(parents=True)
    (folder / "previews").mkdir()
    (folder / "run.json").write_text(json.dumps({"output_name": name, "model": "flux.safetensors", **facts}))
    for file in [
        *("progress.jsonl", "summary.json", f"{name}.safetensors", f"{name}-best.safetensors", f"{name}.api.json"),
        *(f"{name}.workflow.json", "state-000100.tessera", f"{name}_steps/{name}-step000100.safetensors"),
        *("previews/step000100_0.png", "previews/step000100_1.webp", "previews/sheet.png", "previews/previews.json"),
        f".{'0' * 32}-00000000-1-00000000.part",
    ]:
        (folder / file).write_text(file)
    return RunFolder(folder, name)


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_that_a_run_writes_goes_to_the_folder_of_the_day_and_comes_back_as_it_was(tmp_path):
    root, trash = tmp_path / "loras", tmp_path / ".tessera-trash"
    run = make_run(root, "styles/fox (003)", "fox")
    make_run(root, "styles/fox (004)", "fox")
    files = files_of(root)
    target, remaining = move_to_trash(run, root, trash, DAY)
    assert target == trash / DAY / "styles" / "fox (003)" and remaining == 0 and not run.path.exists()
    assert files_of(root).keys() == {file for file in files if "(004)" in file}
    ((day, deleted),) = deleted_runs(trash)
    assert day == trash / DAY and deleted.folder == RunFolder(target, "fox")
    restore(deleted.folder, root / "styles" / "fox (003)", root, trash)
    assert files_of(root) == files and not trash.exists()


def test_files_removed_for_good_are_the_pack_s_own_and_an_empty_trash_goes(tmp_path):
    root, trash = tmp_path / "loras", tmp_path / ".tessera-trash"
    targets = [move_to_trash(make_run(root, f"styles/fox ({n})", "fox"), root, trash, DAY)[0] for n in ("003", "004")]
    shutil.rmtree(root)
    (targets[0] / "mine.txt").write_text("mine")
    remove_for_good(RunFolder(targets[1], "fox"), trash)
    assert not targets[1].exists() and (targets[0] / "fox.safetensors").is_file()
    remove_for_good(RunFolder(targets[0], "fox"), trash)
    assert files_of(tmp_path).keys() == {f".tessera-trash/{DAY}/styles/fox (003)/mine.txt"}
    assert list(deleted_runs(trash)) == []
    (targets[0] / "mine.txt").unlink()
    (targets[0] / "run.json").write_text("{}")
    remove_for_good(RunFolder(targets[0], "fox"), trash)
    assert tmp_path.is_dir() and not trash.exists()


def test_a_run_that_is_removed_in_part_is_still_listed(tmp_path, monkeypatch):
    root, trash = tmp_path / "loras", tmp_path / ".tessera-trash"
    target, _ = move_to_trash(make_run(root, "fox (003)", "fox"), root, trash, DAY)
    unlink = os.unlink

    def refuse(path, **options):
        if Path(path).name == "sheet.png":  # as Windows does for a file that is open
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(PermissionError):
        remove_for_good(RunFolder(target, "fox"), trash)
    ((_, deleted),) = deleted_runs(trash)
    assert deleted.folder.path == target
    monkeypatch.undo()
    remove_for_good(deleted.folder, trash)
    assert not trash.exists()


@LINKS
def test_a_trash_that_is_a_link_holds_no_runs(tmp_path):
    make_run(tmp_path / "elsewhere" / DAY, "fox (001)", "fox")
    (tmp_path / ".tessera-trash").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert list(deleted_runs(tmp_path / ".tessera-trash")) == []


def test_files_of_others_stay_and_come_together_with_the_run_again(tmp_path):
    root, trash = tmp_path / "loras", tmp_path / ".tessera-trash"
    run = make_run(root, "fox (001)", "fox")
    other_files = ["notes.txt", "fox.preview.jpg", "wolf.safetensors", "previews/mine.png", "fox_steps/fox.safetensors"]
    other_files += [
        "fox-step1.safetensors",
        "state-1.tessera",
        "run.json.bak",
        "deep/run.json",
        ".x.part",
        "previews/run.json",
    ]
    for file in other_files:
        (run.path / file).parent.mkdir(exist_ok=True)
        (run.path / file).write_text("mine")
    files = files_of(root)
    target, remaining = move_to_trash(run, root, trash, DAY)
    assert remaining == len(other_files) and files_of(run.path).keys() == set(other_files)
    restore(RunFolder(target, "fox"), run.path, root, trash)
    assert files_of(root) == files


def test_runs_of_the_same_place_do_not_meet_in_the_trash_and_the_last_comes_back(tmp_path):
    root, trash = tmp_path / "loras", tmp_path / ".tessera-trash"
    for number in range(1, 12):
        run = make_run(root, "fox (001)", "fox", steps=number)
        move_to_trash(run, root, trash, DAY)
    days = [day.name for day, _ in deleted_runs(trash)]
    assert days[:2] == [f"{DAY} (11)", f"{DAY} (10)"] and days[-1] == DAY
    _, last = next(deleted_runs(trash))
    restore(last.folder, root / "fox (001)", root, trash)
    assert json.loads((root / "fox (001)" / "run.json").read_text())["steps"] == 11
    _, next_one = next(deleted_runs(trash))
    files = files_of(tmp_path)
    with pytest.raises(ValueError, match=r"fox \(001\) is the folder of another run by now; rename that one"):
        restore(next_one.folder, root / "fox (001)", root, trash)
    assert files_of(tmp_path) == files


@LINKS
def test_a_link_is_neither_moved_nor_followed(tmp_path):
    root, trash = tmp_path / "loras", tmp_path / ".tessera-trash"
    run = make_run(root, "fox (001)", "fox")
    outside = tmp_path / "outside"
    for folder in ("previews", "fox_steps"):
        shutil.move(run.path / folder, outside / folder)
        (run.path / folder).symlink_to(outside / folder, target_is_directory=True)
    (outside / "secret").write_text("secret")
    (run.path / "fox.safetensors").unlink()
    (run.path / "fox.safetensors").symlink_to(outside / "secret")
    files = files_of(outside)
    assert {file.name for file in own_files(run)}.isdisjoint({"fox.safetensors", "sheet.png"})
    target, _ = move_to_trash(run, root, trash, DAY)
    assert files_of(outside) == files and not (target / "previews").exists()
    assert (run.path / "fox.safetensors").is_symlink() and (run.path / "previews").is_symlink()


@LINKS
@pytest.mark.parametrize("link", [".tessera-trash", f".tessera-trash/{DAY}", f".tessera-trash/{DAY}/styles"])
def test_a_trash_that_leads_elsewhere_is_refused_and_nothing_is_made_there(tmp_path, link):
    root, trash = tmp_path / "loras", tmp_path / ".tessera-trash"
    run = make_run(root, "styles/fox (001)", "fox")
    (outside := tmp_path / "outside").mkdir()
    (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / link).symlink_to(outside, target_is_directory=True)
    files = files_of(root)
    with pytest.raises(ValueError, match="there is a link on the way"):
        move_to_trash(run, root, trash, DAY)
    assert files_of(root) == files and not list(outside.iterdir())


@LINKS
def test_a_run_is_not_brought_back_through_a_link(tmp_path):
    root, trash = tmp_path / "loras", tmp_path / ".tessera-trash"
    run = make_run(root, "styles/fox (001)", "fox")
    target, _ = move_to_trash(run, root, trash, DAY)
    (root / "styles").rmdir()
    (outside := tmp_path / "outside").mkdir()
    (root / "styles").symlink_to(outside, target_is_directory=True)
    with pytest.raises(ValueError, match="there is a link on the way"):
        restore(RunFolder(target, "fox"), run.path, root, trash)
    assert not list(outside.iterdir()) and (target / "run.json").is_file()


def test_files_are_not_moved_if_one_cannot_be(tmp_path, monkeypatch):
    root, trash = tmp_path / "loras", tmp_path / ".tessera-trash"
    run = make_run(root, "fox (001)", "fox")
    files = files_of(root)
    rename = os.rename

    def held_open(source, target, **folders):  # as Windows does with a LoRA that a process has mapped
        if Path(source).name == "fox.safetensors":
            raise PermissionError(13, "The process cannot access the file")
        rename(source, target, **folders)

    monkeypatch.setattr(os, "rename", held_open)
    with pytest.raises(ValueError, match=r"fox \(001\): a file can't be moved: The process cannot access"):
        move_to_trash(run, root, trash, DAY)
    assert files_of(root) == files and not list(deleted_runs(trash))


def test_a_disk_that_fills_on_the_way_keeps_no_part_of_a_file(tmp_path, monkeypatch):
    root, trash = tmp_path / "loras", tmp_path / ".tessera-trash"
    run = make_run(root, "fox (001)", "fox")
    files = files_of(root)

    def other_disk(source, target, **folders):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    def copy(source, target):
        data = source.read()
        if data == b"fox.safetensors":
            target.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        target.write(data)

    monkeypatch.setattr(os, "rename", other_disk)
    monkeypatch.setattr(shutil, "copyfileobj", copy)
    with pytest.raises(ValueError, match=r"fox \(001\): a file can't be moved: No space left on device"):
        move_to_trash(run, root, trash, DAY)
    assert files_of(root) == files and not files_of(trash)


def test_a_run_moves_to_another_disk_with_its_times(tmp_path, monkeypatch):
    root, trash = tmp_path / "loras", tmp_path / ".tessera-trash"
    run = make_run(root, "fox (001)", "fox")
    os.utime(run.lora_path, ns=(10**18, 10**18 + 1000))
    files = files_of(run.path)

    def other_disk(source, target, **folders):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", other_disk)
    target, remaining = move_to_trash(run, root, trash, DAY)
    assert files_of(target) == files and remaining == 0 and not run.path.exists()
    assert (target / "fox.safetensors").stat().st_mtime_ns == 10**18 + 1000


def test_every_run_is_found_once_and_what_is_none_is_not(tmp_path):
    root = tmp_path / "loras"
    for place, name in [("fox (001)", "fox"), ("styles/deep/ink (010)", "ink")]:
        make_run(root, place, name)
    make_run(root, "fox (001)/inner (001)", "inner")
    for folder in ("empty (001)", "other", "styles (002)"):
        (root / folder).mkdir()
    (root / "other" / "run.json").write_text("{}")
    make_run(root, "styles (002)/a (001)", "a")
    runs = {(run.folder.path.relative_to(root).as_posix(), run.folder.name) for run in all_runs(root)}
    assert runs == {
        ("fox (001)", "fox"), ("styles/deep/ink (010)", "ink"),
        ("fox (001)/inner (001)", "inner"), ("styles (002)/a (001)", "a"),
    }  # fmt: skip
    assert list(all_runs(tmp_path / "absent")) == []


@LINKS
def test_links_and_names_that_are_no_text_do_not_lead_the_search_astray(tmp_path):
    root = tmp_path / "loras"
    make_run(tmp_path / "outside", "secret (001)", "secret")
    root.mkdir()
    (root / "secret (001)").symlink_to(tmp_path / "outside" / "secret (001)", target_is_directory=True)
    (root / "loop").symlink_to(root, target_is_directory=True)
    (root / "linked (001)").mkdir()
    (root / "linked (001)" / "run.json").symlink_to(tmp_path / "outside" / "secret (001)" / "run.json")
    assert list(all_runs(root)) == []
    (bad := root / os.fsdecode(b"f\xffx (001)")).mkdir()
    (bad / "run.json").write_text("{}")
    (run,) = RunIndex().search(root, "")
    assert json.loads(json.dumps(run.place)) == run.place


def test_a_search_takes_all_words_in_any_script_and_shows_the_newest_first(tmp_path):
    places = [("red fox (001)", "red fox"), ("styles/Füchse (001)", "Füchse"), ("wolf (001)", "wolf")]
    for position, (place, name) in enumerate(places):
        run = make_run(tmp_path, place, name, steps=position, model=["x"] if name == "wolf" else "FLUX.safetensors")
        for file in ("run.json", "progress.jsonl", "summary.json"):
            os.utime(run.path / file, (1e9 + position, 1e9 + position))
    index = RunIndex()

    def places_of(query):
        return [run.place for run in index.search(tmp_path, query)]

    assert places_of("") == ["wolf (001)", "styles/Füchse (001)", "red fox (001)"]
    assert places_of("FOX red") == ["red fox (001)"] and places_of("flux") == ["styles/Füchse (001)", "red fox (001)"]
    assert places_of(normalize("NFD", "füchse")) == ["styles/Füchse (001)"] and places_of("fox wolf") == []
    assert [run.facts["model"] for run in index.search(tmp_path, "wolf")] == [""]
    os.utime(tmp_path / "red fox (001)" / "progress.jsonl", (2e9, 2e9))
    assert places_of("")[0] == "red fox (001)"
    (tmp_path / "wolf (001)" / "run.json").write_text('{"model": "sdxl", "steps": 7}')
    assert [run.facts["steps"] for run in index.search(tmp_path, "sdxl")] == [7]
    shutil.rmtree(tmp_path / "wolf (001)")
    assert places_of("wolf") == []


def test_runs_come_in_pages_and_each_is_read_once(tmp_path, monkeypatch):
    for number in range(1, 501):
        folder = tmp_path / f"fox ({number:03d})"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"output_name": "fox", "steps": number}))
    index = RunIndex()
    runs = index.search(tmp_path, "")
    pages = [page_of(runs, number) for number in range(4)]
    assert [len(page) for page in pages] == [200, 200, 100, 0]
    assert {run.facts["steps"] for page in pages for run in page} == set(range(1, 501))
    from tessera.nodes.train import run_index

    monkeypatch.setattr(run_index, "RunReader", None)  # to read one again would fail
    begin = time.monotonic()
    assert index.search(tmp_path, "") == runs
    assert time.monotonic() - begin < 5


@LINKS
@pytest.mark.parametrize("planted", ["previews", "fox_steps"])
def test_a_link_planted_inside_of_a_runs_folder_is_not_followed(tmp_path, planted):
    root = tmp_path / "loras"
    trash = tmp_path / ".tessera-trash"
    outside = tmp_path / "outside"
    outside.mkdir()
    target, _ = move_to_trash(make_run(root, "fox (003)", "fox"), root, trash, DAY)
    files = files_of(target)
    (root / "fox (003)").mkdir(parents=True)
    (root / "fox (003)" / planted).symlink_to(outside)
    with pytest.raises(
        ValueError, match=r"fox \(003\): there is a link on the way to fox \(003\), and none is followed"
    ):
        restore(RunFolder(target, "fox"), root / "fox (003)", root, trash)
    assert not list(outside.iterdir()) and files_of(target) == files


@LINKS
def test_a_folder_that_is_swapped_for_a_link_when_it_is_emptied_is_left_alone(tmp_path, monkeypatch):
    root = tmp_path / "loras"
    trash = tmp_path / ".tessera-trash"
    outside = tmp_path / "outside"
    target, _ = move_to_trash(make_run(root, "fox (003)", "fox"), root, trash, DAY)
    shutil.copytree(target / "previews", outside)
    files = own_files(RunFolder(target, "fox"))
    shutil.rmtree(target / "previews")
    (target / "previews").symlink_to(outside)
    monkeypatch.setattr(run_trash, "own_files", lambda folder: files)  # as listed before the swap
    with pytest.raises(OSError):
        remove_for_good(RunFolder(target, "fox"), trash)
    assert len(files_of(outside)) == 4

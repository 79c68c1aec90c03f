"""The cache on disk: what is written comes back, and anything less than whole counts as absent."""

import errno
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from tessera.common import files
from tessera.common.files import lock_of, sweep_temporary, sweep_unfinished, write_atomically
from tessera.data.cache import Cache, EncodeJob, run_jobs
from with_pack import ROOT

SHAPES = {"latent": (16, 4, 6), "extra": (1, None)}


@pytest.fixture
def tensors():
    return {"latent": torch.randn(16, 4, 6).to(torch.bfloat16), "extra": torch.randn(1, 7, dtype=torch.float64)}


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def test_tensors_come_back_in_their_own_dtype_and_may_be_saved_for_backward(cache, tensors):
    with torch.inference_mode():
        cache.write("abcd", {name: tensor.clone() for name, tensor in tensors.items()})
        cached = cache.read("abcd")
    assert cache.holds("abcd", SHAPES)
    for name, tensor in tensors.items():
        assert torch.equal(cached[name], tensor) and cached[name].dtype == tensor.dtype
        assert not cached[name].is_inference()


def test_a_part_of_a_larger_tensor_is_written_as_it_is_seen(cache):
    whole = torch.arange(24.0).reshape(4, 6)
    cache.write("abcd", {"latent": whole[:, 1:4]})
    assert torch.equal(cache.read("abcd")["latent"], whole[:, 1:4])


@pytest.mark.parametrize(
    "shapes",
    [
        {"latent": (16, 4, 5), "extra": (1, 7)},
        {"latent": (16, 4, 6)},
        {"latent": (16, 4, 6), "extra": (1, 7), "more": (1,)},
        {"latent": (16, 4, 6, 1), "extra": (1, 7)},
    ],
)
def test_other_names_or_shapes_do_not_count(cache, tensors, shapes):
    cache.write("abcd", tensors)
    assert not cache.holds("abcd", shapes)


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"x" * len(data)])
def test_a_damaged_file_counts_as_absent(cache, tensors, damage):
    cache.write("abcd", tensors)
    path = cache.path("abcd")
    path.write_bytes(damage(path.read_bytes()))
    assert not cache.holds("abcd", SHAPES)
    with pytest.raises(FileNotFoundError):
        cache.read("abcd")
    cache.write("abcd", tensors)
    assert cache.holds("abcd", SHAPES)


def test_missing_keys_are_not_held(cache):
    assert not cache.holds("abcd", SHAPES)
    with pytest.raises(FileNotFoundError):
        cache.read("abcd")


def test_a_full_disk_leaves_the_old_file_and_no_litter(cache, tensors, monkeypatch):
    cache.write("abcd", tensors)
    content = cache.path("abcd").read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="the disk is full; free some space"):
        cache.write("abcd", {"latent": torch.zeros(1)})
    assert cache.path("abcd").read_bytes() == content
    assert [path.name for path in cache.path("abcd").parent.iterdir()] == ["abcd.safetensors"]


KILLED = f"""
import os, pathlib, sys
sys.path[0] = {str(ROOT / "tests" / "support")!r}
import with_pack
from tessera.common import files

def half(beside):
    beside.write_bytes(b"half")
    if sys.argv[2] == "killed":
        os._exit(0)
    print("writing", flush=True)
    sys.stdin.read()

files.write_atomically(pathlib.Path(sys.argv[1]) / "file", half)
"""


def unfinished(folder):
    return sorted(path for path in folder.rglob("*") if path.suffix == ".part")


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_folder_after_that(tmp_path, monkeypatch):
    """Else a power cut could leave the name of a whole file on an empty one."""
    happened = []
    fsync = os.fsync
    replace = os.replace

    def flushed(handle):
        happened.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def renamed(source, target):
        happened.append("name")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    write_atomically(tmp_path / "file", lambda beside: beside.write_bytes(b"whole"))
    assert happened == ["file", "name", "folder"]


def test_files_of_a_killed_process_are_swept_and_those_of_a_live_one_are_not(tmp_path):
    folder = tmp_path / "previews"
    folder.mkdir()
    command = [sys.executable, "-c", KILLED, str(folder)]
    subprocess.run([*command, "killed"], check=True)
    (leftover,) = unfinished(folder)
    with subprocess.Popen([*command, "live"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as live:
        live.stdout.readline()
        (writing,) = {*unfinished(folder)} - {leftover}
        sweep_unfinished(tmp_path)
        assert unfinished(folder) == [writing]
        live.communicate("")
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_old_locks_and_folders_of_ended_processes_go_from_the_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    ended_pid, alive = int(ended.stdout), os.getpid()
    for name in (
        f"tessera-device-{ended_pid}-a1_b2",
        f"tessera-device-{ended_pid}-new",
        f"tessera-device-{alive}-c3",
        "tessera-x",
    ):
        (tmp_path / name / "inside").mkdir(parents=True)
    busy, free, new = (lock_of(f"{number:016x}") for number in range(3))
    for lock in (busy, free, new):
        lock.acquire()
    free.release()
    new.release()
    (tmp_path / "tessera-of-another.lock").touch()
    for path in tmp_path.iterdir():
        age = 3600 if path.name.endswith("-new") or path == Path(new.lock_file) else 8 * 24 * 3600
        os.utime(path, (time.time() - age,) * 2)
    (tmp_path / "tessera-00000000000000ff.lock").symlink_to(tmp_path / "tessera-x")
    sweep_temporary()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        f"tessera-device-{ended_pid}-new",
        f"tessera-device-{alive}-c3",
        "tessera-x",
        "tessera-of-another.lock",
        "tessera-00000000000000ff.lock",
        *(Path(lock.lock_file).name for lock in (busy, new)),
    }
    busy.release()


def test_files_of_this_process_stay_and_those_of_an_earlier_one_of_its_number_go(tmp_path):
    """In a container a server that was restarted may have the number of the one that was killed."""
    unfinished_names = []

    def write(beside):
        unfinished_names.append(beside.name)
        beside.with_name(beside.name.replace(files._SESSION, "0" * 8)).touch()
        sweep_unfinished(tmp_path)
        assert unfinished(tmp_path) == [beside]

    write_atomically(tmp_path / "file", write)
    assert unfinished_names and not unfinished(tmp_path)


@pytest.mark.parametrize("name", [".0123.part", f".{'0' * 32}-{'f' * 8}-1-{'0' * 8}.part"])
def test_the_files_of_another_machine_or_version_are_swept_after_a_day_without_a_write(name, tmp_path):
    (tmp_path / name).touch()
    sweep_unfinished(tmp_path)
    assert unfinished(tmp_path)
    os.utime(tmp_path / name, 2 * (time.time() - 25 * 60 * 60,))
    (tmp_path / "other.part").touch()
    sweep_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other.part"]


def test_encoding_sweeps_the_whole_cache(cache, tensors):
    leftover = cache.path("ffff").with_name(".0123.part")
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    os.utime(leftover, (0, 0))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    run_jobs(
        cache, [EncodeJob("abcd", shapes, 1, lambda: tensors, "a picture")], "pictures", lambda *_: None, lambda: None
    )
    assert not leftover.exists() and cache.holds("abcd", shapes)

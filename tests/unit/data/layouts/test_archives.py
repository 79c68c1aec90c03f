"""Archives as folders: unpacked once for each version, each member in its place, and one sentence on what can't be."""

import io
import os
import shutil
import tarfile
import zipfile
from collections import namedtuple

import pytest
from PIL import Image
from tessera.common.untrusted import budgets
from tessera.data.folders.dataset import Places, scan_images
from tessera.data.layouts import archives
from tessera.data.layouts.archives import is_archive, unpack

PNG = io.BytesIO()
Image.new("RGB", (8, 8)).save(PNG, "PNG")


def packed(path, *members):
    """Write a zip or tar of (name, content) in their order."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members:
                archive.writestr(name, content)
        return path
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def unpacked(path, cache):
    return unpack(path, cache, lambda: None)


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tgz", "A.ZIP"])
def test_archives_are_known_by_their_ends(tmp_path, name):
    photos = tmp_path / "photos"
    photos.mkdir()
    packed(photos / name, ("x.png", PNG.getvalue()), ("x.txt", b"a fox")) if name != "A.ZIP" else packed(
        photos / "a.zip", ("x.png", PNG.getvalue()), ("x.txt", b"a fox")
    ).rename(photos / name)
    places = Places(open_archive=lambda path: unpacked(path, tmp_path / "cache"))
    (entry,) = scan_images(photos, places=places).entries
    assert (entry.name, entry.caption) == (f"{name}/x.png", "a fox")
    assert not is_archive(f".{name}")


def test_an_archive_is_unpacked_once_and_anew_when_its_time_or_size_differs(tmp_path):
    cache = tmp_path / "cache"
    path = packed(tmp_path / "a.zip", ("x.txt", b"one"))
    os.utime(path, (1000, 1000))
    first = unpacked(path, cache).folder
    (first / "x.txt").write_text("kept")
    assert contents(unpacked(path, cache).folder) == {"x.txt": b"kept"}
    os.utime(packed(path, ("x.txt", b"four")), (1000, 1000))  # another size
    assert contents(unpacked(path, cache).folder) == {"x.txt": b"four"}
    os.utime(packed(path, ("x.txt", b"five")), (2000, 2000))  # another time
    assert contents(unpacked(path, cache).folder) == {"x.txt": b"five"}
    assert not first.exists() and len(list(cache.rglob("x.txt"))) == 1  # nothing is left of the older ones


@pytest.mark.parametrize("ending", ["zip", "tar"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_whose_place_is_taken_is_left_out_and_named(tmp_path, ending):
    members = [("a.txt", b"first"), ("a.txt", b"second"), ("a.txt/b.txt", b"below a file"), ("c/d.txt", b"deep")]
    result = unpacked(packed(tmp_path / f"p.{ending}", *members), tmp_path / "cache")
    assert contents(result.folder) == {"a.txt": b"first", "c/d.txt": b"deep"}
    assert result.left_out == "a.txt, a.txt/b.txt"


def test_members_that_nothing_reads_are_left_out(tmp_path):
    members = [("a.png", PNG.getvalue()), ("run.py", b"x"), ("a.safetensors", b"x"), ("b.mp4", b"x"), ("c.mask", b"x")]
    result = unpacked(packed(tmp_path / "p.zip", *members), tmp_path / "cache")
    assert contents(result.folder).keys() == {"a.png", "b.mp4", "c.mask"}
    assert result.left_out == "run.py, a.safetensors"


@pytest.mark.parametrize(
    "name",
    ["con.png", "Con.png", "a:b.png", "a?.png", 'a".png', "a\n.png", "/".join("x" * 21) + ".png", "x" * 237 + ".png"],
)
def test_names_that_a_system_refuses_have_no_place(name):
    assert archives.safe_place(name) is None
    assert archives.safe_place("a.png") is not None and archives.safe_place("./a/b.png") is not None


def test_an_encrypted_archive_is_told(tmp_path):
    path = packed(tmp_path / "a.zip", ("a.txt", b"x" * 20))
    data = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):  # the flag of encryption in both headers
        data[data.index(mark) + offset] |= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="The archive 'a.zip' can't be read, because it is encrypted; unpack it yours"):
        unpacked(path, tmp_path / "cache")


def test_a_compression_that_takes_memory_as_it_likes_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.txt", b"x" * 100)
    with pytest.raises(ValueError, match="The archive 'a.zip' can't be read, because it's damaged, or not an archive"):
        unpacked(tmp_path / "a.zip", tmp_path / "cache")


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    path = packed(tmp_path / "a.tar", ("a.png", bytes(200 << 10)))
    monkeypatch.setattr(archives, "_PIECE", 1 << 10)  # looked at after every 64
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1 << 40, 1 << 40, 1 << 29))
    with pytest.raises(
        ValueError, match="'a.tar' can't be unpacked .the disk of ComfyUI's user folder is full.; unpack"
    ):
        unpacked(path, tmp_path / "cache")
    assert not contents(tmp_path / "cache")


def test_a_large_archive_may_unpack_to_more(tmp_path, monkeypatch):
    path = packed(tmp_path / "a.tar", ("a.png", bytes(2000)))
    monkeypatch.setattr(archives, "UNPACKED", budgets.Budget("a small archive", "", "unpack it", bytes=1000))
    with pytest.raises(ValueError, match="more than a small archive may have"):
        unpacked(path, tmp_path / "cache")
    monkeypatch.setattr(archives, "_LARGE_ARCHIVE", 2000)
    assert contents(unpacked(path, tmp_path / "cache").folder).keys() == {"a.png"}


def test_a_sparse_member_is_left_out(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("a.png")
        info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)}
        info.size = 512
        archive.addfile(info, io.BytesIO(b"1\n0\n1\n".ljust(512, b"\0")))
        info = tarfile.TarInfo("b.txt")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"b"))
    assert contents(unpacked(path, tmp_path / "cache").folder).keys() == {"b.txt"}


def test_an_archive_is_read_beside_a_dataset_file_and_not_with_a_plain_layout(tmp_path):
    photos = tmp_path / "photos"
    (photos / "in").mkdir(parents=True)
    (photos / "in" / "a.png").write_bytes(PNG.getvalue())
    (photos / "in" / "a.txt").write_text("a fox")
    packed(photos / "b.zip", ("b.png", PNG.getvalue()), ("b.txt", b"an owl"))
    (photos / "d.toml").write_text("[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'in'\nnum_repeats = 3\n")

    def read(layout):
        places = Places(layout, open_archive=lambda path: unpacked(path, tmp_path / "cache"))
        return {entry.name: entry.repeats for entry in scan_images(photos, places=places).entries}

    assert read("auto") == {"in/a.png": 3, "b.zip/b.png": 1}
    assert read("archives") == {"b.zip/b.png": 1}
    assert read("plain") == {"in/a.png": 1}

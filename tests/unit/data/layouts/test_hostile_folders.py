"""Archives, lists and dataset files of strangers: nothing outside, nothing run, one sentence."""

import io
import os
import tarfile
import zipfile

import pytest
from PIL import Image
from tessera.common.untrusted import budgets
from tessera.data.folders.dataset import Places, scan_images
from tessera.data.layouts import archives
from tessera.data.layouts.archives import safe_place, unpack
from tessera.data.layouts.dataset_files import read_dataset_file

PNG = io.BytesIO()
Image.new("RGB", (8, 8)).save(PNG, "PNG")


@pytest.mark.parametrize(
    "name",
    [
        "../a.png",
        "/a.png",
        "x/../../a.png",
        "C:/a.png",
        "..\\a.png",
        "\\\\server\\a.png",
        ".a.png",
        "__MACOSX/a.png",
        "",
    ]
    + ["con.png", "a\0.png", "a. /b.png", "x" * 300 + ".png"],
)
def test_a_member_that_would_leave_its_folder_has_no_place(name):
    assert safe_place(name) is None


def test_files_of_an_archive_stay_inside_and_links_are_left_out(tmp_path):
    path = tmp_path / "photos" / "a.tar"
    path.parent.mkdir()
    with tarfile.open(path, "w") as tar:
        for name in ("../out.png", "/abs.png", "in/a.png", "in/a.txt", "run.pkl"):
            info = tarfile.TarInfo(name)
            info.size = len(PNG.getvalue())
            tar.addfile(info, io.BytesIO(PNG.getvalue()))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo("in/link.png")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    cache = tmp_path / "cache"
    unpacked = unpack(path, cache, lambda: None)
    assert sorted(p.name for p in cache.rglob("*") if p.is_file()) == [".left_out", "a.png", "a.txt"]
    assert unpacked.left_out == "../out.png, /abs.png, run.pkl"
    assert not (tmp_path / "out.png").exists() and not any(p.is_symlink() for p in cache.rglob("*"))


@pytest.mark.parametrize("bound", ["bytes", "items"])
def test_an_archive_past_its_budget_is_told_and_leaves_nothing(tmp_path, monkeypatch, bound):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for n in range(3):
            packed.writestr(f"{n}.png", bytes(1 << 20))
    small = {"bytes": 200_000_000_000, "items": 500_000} | {bound: 2}
    for name in ("ARCHIVE", "UNPACKED"):
        monkeypatch.setattr(archives, name, budgets.Budget("an archive", "", "unpack it yourself", **small))
    with pytest.raises(ValueError, match="a.zip has .* more than an archive may have; unpack it yourself"):
        unpack(path, tmp_path / "cache", lambda: None)
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz"])
def test_files_that_are_no_archive_are_told(tmp_path, name):
    (tmp_path / name).write_bytes(b"not an archive" * 100)
    with pytest.raises(ValueError, match=f"The archive '{name}' can't be read"):
        unpack(tmp_path / name, tmp_path / "cache", lambda: None)


def test_a_dataset_file_opens_no_place_outside(tmp_path):
    (tmp_path / "secret").mkdir()
    for place in ("secret", "photos/in"):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "a.png").write_bytes(PNG.getvalue())
        (tmp_path / place / "a.txt").write_text(place)
    outside = str(tmp_path / "secret").replace("\\", "/")
    text = f'[[datasets]]\nimage_directory = "in"\n[[datasets]]\nimage_directory = "{outside}"\n'
    (tmp_path / "photos" / "d.toml").write_text(text)
    with pytest.raises(ValueError, match="has '.*secret' as image_directory, which is not below its own folder"):
        scan_images(tmp_path / "photos")
    allowed = scan_images(tmp_path / "photos", places=Places(may_read=lambda path: True))
    assert [entry.caption for entry in allowed.entries] == ["photos/in", "secret"]
    (tmp_path / "photos" / "d.toml").write_text(text.replace(outside, "../secret"))
    with pytest.raises(ValueError, match="not below its own folder"):
        scan_images(tmp_path / "photos")


def test_a_list_names_no_file_outside(tmp_path):
    (tmp_path / "photos").mkdir()
    for name in ("photos/a.png", "b.png"):
        (tmp_path / name).write_bytes(PNG.getvalue())
    (tmp_path / "photos" / "metadata.csv").write_text("file_name,text\na.png,x\n../b.png,y\n")
    dataset = scan_images(tmp_path / "photos")
    assert [entry.name for entry in dataset.entries] == ["a.png"]
    assert "These files of the list are not in the folder: ../b.png." in dataset.notes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", "a = " + "[" * 5000),
        ("a.toml", "[[datasets]"),
        ("a.yaml", "a: " + "[" * 5000),
        ("a.yaml", "a: !!python/object/apply:os.system ['echo x']"),
        ("a.yaml", "a: &a [*a]\ndatasets: *a"),
        ("dataset.json", '{"datasets": 3}'),
        ("a.toml", "x = 1\n" * 50_000),
    ],
)
def test_a_broken_dataset_file_is_one_sentence_or_none(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    try:
        assert read_dataset_file(tmp_path / name) is None
    except ValueError as error:
        assert str(error).startswith("The dataset file 'a.toml' can't be read") and os.linesep not in str(error)

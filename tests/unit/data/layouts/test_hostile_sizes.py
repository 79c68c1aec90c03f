"""Inputs of the fuzz that took time, memory or a raw error of the readers of folders, each at its smallest."""

import gzip
import io
import os
import tarfile
import zipfile

import pytest
from PIL import Image
from tessera.common.untrusted import budgets
from tessera.data.folders import captions
from tessera.data.folders.dataset import folder_fingerprint, scan_images
from tessera.data.layouts import archives, files
from tessera.data.layouts.archives import unpack
from tessera.data.layouts.caption_lists import ListReader, match_lists, read_list
from tessera.data.layouts.captions import json_caption
from tessera.data.layouts.dataset_files import read_dataset_file, resolve_place
from tessera.data.layouts.folder_names import parse_folder_name
from tessera.data.media.clip_windows import Extraction, parse_target_frames

PNG = io.BytesIO()
Image.new("RGB", (8, 8)).save(PNG, "PNG")


class Cancelled(Exception):
    pass


def cancel_after(calls: int):
    """Make an `interrupted` that raises after so many calls."""
    left = iter(range(calls))

    def interrupted() -> None:
        if next(left, None) is None:
            raise Cancelled

    return interrupted


def write(path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def photos(tmp_path, *names: str):
    for name in names or ("a",):
        write(tmp_path / f"{name}.txt", "a fox")
        (tmp_path / f"{name}.png").write_bytes(PNG.getvalue())
    return tmp_path


# Lists of captions


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metadata.jsonl", "\n" * 500_001, "has 500,001 entries .* more than a list of captions"),
        ("metadata.csv", "a," * 101 + "\n", "has 102 entries .* more than the first line of a table of captions"),
        ("captions.txt", "a" * 1_000_001, "has 1,000,001 bytes .* more than a caption file"),
    ],
)
def test_a_long_list_of_captions_is_refused(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        read_list(write(tmp_path / name, text))


def test_lists_of_one_folder_share_a_budget(tmp_path, monkeypatch):
    from tessera.data.layouts import caption_lists

    small = budgets.Budget("a list of captions", "", "divide it", bytes=100, items=100, depth=9)
    monkeypatch.setattr(caption_lists, "CAPTION_LIST", small)
    reader = ListReader()
    first, second = (write(tmp_path / f"{n}" / "captions.txt", "a.png: a" + " fox" * 15) for n in (1, 2))
    assert reader.read(first) is reader.read(first)
    with pytest.raises(ValueError, match=r"captions.txt with the lists before it has 136 bytes"):
        reader.read(second)


def test_a_line_without_an_end_of_its_name_is_read_once(tmp_path):
    text = " " * 300 + "a.png" + " " * 100_000 + "\n b.png |  a fox \nC:\\c.png, x"
    assert [row.file for row in read_list(write(tmp_path / "captions.txt", text)).rows] == ["b.png"]


def test_a_name_of_a_million_accents_matches_nothing(tmp_path):
    # To compose these takes a time quadratic in their number.
    row = '{"file_name": "' + "a\u0301\u0327" * 50_000 + '", "text": "x"}'
    listed = match_lists([read_list(write(tmp_path / "metadata.jsonl", row))], [tmp_path / "a.png"])
    assert not listed.texts and len(listed.missing) == 1


def test_a_caption_in_json_is_kept_as_long_as_one_may_be(tmp_path):
    assert len(json_caption(write(tmp_path / "a.json", '"' + "a" * 900_000 + '"'))) == 20_001


# Dataset files


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", "a." * 50_000 + "a = 1"),
        ("a.toml", "[[datasets]]\nimage_dir = 'in'\n[general]\n" + "\n".join(f"a{n} = 1" for n in range(300))),
        ("a.yaml", "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))),
        ("a.yaml", "- a\n" * 10_001),
        ("a.yaml", "a: " + "1" * 5000),
        ("dataset.json", '{"datasets": [' + '{"a": 1},' * 9_999 + "{}]}"),
    ],
)
def test_a_dataset_file_of_much_work_is_one_sentence_or_none(tmp_path, name, text):
    try:
        assert read_dataset_file(write(tmp_path / name, text)) is None
    except ValueError as error:
        assert str(error).startswith("The dataset file 'a.toml' can't be read")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("num_repeats = inf", "has inf as num_repeats; write a number"),
        ("num_repeats = nan", "has nan as num_repeats; write a number"),
        ("num_repeats = 100000", "num_repeats in 'd.toml' is 100000; set it between 0 and 1000"),
        ("keep_tokens = 1e300", r"has 1e\+300 as keep_tokens; write a number"),
        (f"loss_multiplier = {10**400}", "as loss_multiplier; write a number"),
        (f"mask_path = '{'x' * 300}'", "as mask_path, which is not below"),
        (f"mask_path = '{'x/' * 3000}'", "as mask_path, which is not below"),
        ("mask_path = [" + "'in'," * 101 + "]", "mask_path in a dataset file has 101 entries"),
    ],
)
def test_odd_values_of_a_dataset_file_are_one_sentence(tmp_path, field, message):
    photos(tmp_path / "in")
    write(tmp_path / "d.toml", f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'in'\n{field}\n")
    with pytest.raises(ValueError, match=message):
        scan_images(tmp_path)


def test_a_path_that_the_system_does_not_take_is_not_there(tmp_path):
    assert resolve_place("x" * 300, tmp_path, lambda path: True) is None
    assert resolve_place("/" + "x" * 300, tmp_path, lambda path: True) is None
    assert resolve_place("a/" * 200, tmp_path, lambda path: True) is None


def test_folders_of_a_dataset_file_share_a_budget(tmp_path, monkeypatch):
    from tessera.data.layouts import blocks

    photos(tmp_path, "in/a", "in/b")
    monkeypatch.setattr(blocks, "FOLDER", budgets.Budget("a folder", "", "divide it", items=5))
    write(tmp_path / "d.toml", "[[datasets]]\n" + "[[datasets.subsets]]\nimage_dir = 'in'\n" * 3)
    with pytest.raises(ValueError, match="The folders of 'd.toml' has 6 entries"):
        scan_images(tmp_path)


def test_words_of_a_dataset_file_do_not_multiply_captions(tmp_path):
    photos(tmp_path / "in")
    write(tmp_path / "in" / "a.txt", "[trigger]" * 1000)
    words = f"trigger_word = '{'x' * 2000}'"
    write(tmp_path / "d.toml", f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'in'\n{words}\n")
    with pytest.raises(ValueError, match="A caption with its .trigger. replaced has 2,009,000 bytes"):
        scan_images(tmp_path)


def test_counts_of_clips_are_bounded():
    with pytest.raises(ValueError, match="frame_sample is 1000000000; set it between 1 and 10000"):
        Extraction(method="uniform", frame_sample=10**9)
    with pytest.raises(ValueError, match="target_frames has 101 numbers; write at most 100"):
        parse_target_frames("1," * 101)


def test_a_zero_of_another_script_is_no_count_of_repeats():
    assert parse_folder_name("\u0660_fox") is None


# Archives


def tarred(path, *members, headers=None, packing=""):
    with tarfile.open(path, f"w:{packing}", format=tarfile.PAX_FORMAT, pax_headers=headers or {}) as tar:
        for name, content, kind in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


PICTURE = ("a.png", PNG.getvalue(), tarfile.REGTYPE)


def test_a_header_of_digits_is_refused(tmp_path):
    # `tarfile` looks for hdrcharset after a number, in time quadratic in its digits.
    path = tarred(tmp_path / "a.tar", PICTURE, headers={"comment": "1" * 50_000})
    with pytest.raises(ValueError, match="The archive 'a.tar' can't be read, because it's damaged"):
        unpack(path, tmp_path / "cache", lambda: None)


@pytest.mark.parametrize("packing", ["", "gz"])
def test_members_that_are_no_files_count_too(tmp_path, monkeypatch, packing):
    monkeypatch.setattr(archives, "ARCHIVE", budgets.Budget("an archive", "", "unpack it", bytes=10**9, items=3))
    folders = [(f"d{n}", b"", tarfile.DIRTYPE) for n in range(4)]
    path = tarred(tmp_path / ("a.tar.gz" if packing else "a.tar"), *folders, packing=packing)
    with pytest.raises(ValueError, match="has 4 entries .* more than an archive may have"):
        unpack(path, tmp_path / "cache", lambda: None)


def test_the_table_of_a_zip_is_counted_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "ARCHIVE", budgets.Budget("an archive", "", "unpack it", bytes=10**9, items=20))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        for n in range(21):
            packed.writestr(f"{n}{'x' * 60_000}.png", b"")
    monkeypatch.setattr(zipfile, "ZipInfo", None)  # an entry would raise a TypeError
    with pytest.raises(ValueError, match="has 21 entries .* more than an archive may have"):
        unpack(tmp_path / "a.zip", tmp_path / "cache", lambda: None)


def test_an_entry_without_a_name_is_left_out(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.writestr("a.png", PNG.getvalue())
        packed.writestr(entry := zipfile.ZipInfo("b.png"), b"")
        entry.filename = ""
    assert [p.name for p in unpack(tmp_path / "a.zip", tmp_path / "cache", lambda: None).folder.glob("*.png")] == [
        "a.png"
    ]


def test_a_small_archive_does_not_unpack_to_a_large_one(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "UNPACKED", budgets.Budget("a small archive", "", "unpack it", bytes=1000))
    path = tarred(tmp_path / "a.tar.gz", ("a.png", bytes(2000), tarfile.REGTYPE), packing="gz")
    with pytest.raises(ValueError, match="has 2,000 bytes .* more than a small archive may have"):
        unpack(path, tmp_path / "cache", lambda: None)


def test_a_member_that_is_skipped_can_be_cancelled(tmp_path, monkeypatch):
    path = tarred(tmp_path / "a.tar.gz", ("run.bin", bytes(8 << 20), tarfile.REGTYPE), PICTURE, packing="gz")
    with pytest.raises(Cancelled):
        unpack(path, tmp_path / "cache", cancel_after(8))
    assert [p.name for p in unpack(path, tmp_path / "cache", lambda: None).folder.glob("*.png")] == ["a.png"]


def test_a_packed_tar_is_unpacked_once(tmp_path, monkeypatch):
    # Its members end at a block, where `tarfile` goes back by a byte: gzip would begin anew each time.
    members = [(f"{n}.png", bytes(range(256)) * (1 << 13), tarfile.REGTYPE) for n in range(3)]
    path = tarred(tmp_path / "a.tar.gz", *members, packing="gz")
    read = []
    plain = gzip._GzipReader.read
    monkeypatch.setattr(gzip._GzipReader, "read", lambda self, size=-1: read.append(size) or plain(self, size))
    monkeypatch.setattr(gzip._GzipReader, "_rewind", lambda self: pytest.fail("it began anew"))
    unpacked = unpack(path, tmp_path / "cache", lambda: None)
    assert read and [len((unpacked.folder / name).read_bytes()) for name, _, _ in members] == [1 << 21] * 3


def test_names_that_are_left_out_are_cut_and_counted(tmp_path):
    path = tarred(tmp_path / "a.tar", *((f"../{n}{'x' * 5000}", b"", tarfile.REGTYPE) for n in range(30)))
    left_out = unpack(path, tmp_path / "cache", lambda: None).left_out
    assert left_out.endswith(" and 25 more") and len(left_out) < 700


@pytest.mark.parametrize("name", ["\ud800.png", "/".join(["x" * 200] * 6) + ".png"])
def test_a_name_that_no_file_has_is_left_out(name):
    assert archives.safe_place(name) is None


# Folders


def test_a_folder_of_too_many_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FOLDER", budgets.Budget("a folder", "", "divide it", items=3))
    with pytest.raises(ValueError, match="has 4 entries .* more than a folder may have; divide it"):
        scan_images(photos(tmp_path, "a", "b"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="The system has no pipes.")
def test_a_pipe_and_a_device_are_not_listed_and_a_broken_link_is(tmp_path):
    photos(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "device.png").symlink_to("/dev/zero")
    (tmp_path / "broken.png").symlink_to("nowhere")
    (tmp_path / "link.png").symlink_to("a.png")
    assert [path.name for path in files.image_files(tmp_path)] == ["a.png", "broken.png", "link.png"]


@pytest.mark.parametrize("name", ["", "metadata.jsonl", "d.toml"])
def test_reading_a_folder_obeys_cancel(tmp_path, name):
    photos(tmp_path, "a", "in/a")
    if name:
        text = "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'in'\n" if name == "d.toml" else '{"file_name": "b"}\n'
        write(tmp_path / name, text)
    calls = []
    folder_fingerprint(tmp_path, ".txt", interrupted=lambda: calls.append(1))
    assert len(calls) > 4
    for count in range(len(calls)):
        with pytest.raises(Cancelled):
            folder_fingerprint(tmp_path, ".txt", interrupted=cancel_after(count))


def test_making_the_forms_of_captions_obeys_cancel_between_two(tmp_path, monkeypatch):
    photos(tmp_path, "a", "b", "c")
    forms = []

    def cancel_after_one() -> None:
        if forms:
            raise Cancelled

    make = captions.make_caption_variants
    monkeypatch.setattr(captions, "make_caption_variants", lambda *args: forms.append(args) or make(*args))
    with pytest.raises(Cancelled):
        scan_images(tmp_path, interrupted=cancel_after_one)
    assert len(forms) == 1

"""Bounds on dataset files of other trainers, and folders whose names are no UTF-8."""

import os
import zipfile

import pytest
from PIL import Image
from tessera.data.captioning.ledger import Ledger
from tessera.data.layouts.archives import unpack
from tessera.data.layouts.dataset_files import read_dataset_file

POSIX = pytest.mark.skipif(os.name == "nt", reason="names of Windows are text")
YAML = "config:\n  process:\n    - datasets:\n        - folder_path: photos\n"
TOML = '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "photos"\n'


def read(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    return read_dataset_file(tmp_path / name)


def test_a_dataset_file_within_its_bounds_is_read(tmp_path):
    assert read(tmp_path, "a.yaml", YAML) and read(tmp_path, "a.toml", TOML)
    assert read(tmp_path, "b.yaml", f"{YAML}x: {'[' * 10}{']' * 10}\n")
    assert read(tmp_path, "c.yaml", f"{YAML}x: &a {{b: 1}}\ny: [{'*a, ' * 5}1]\n")
    assert read(tmp_path, "b.toml", f"{TOML}[{'.'.join('a' * 20)}]\n")


@pytest.mark.parametrize("more", [f"x: {'[' * 30}{']' * 30}", f"x: &a {{b: 1}}\ny: [{'*a, ' * 30}1]"])
def test_deep_and_repeating_yaml_is_no_dataset_file(tmp_path, more):
    assert read(tmp_path, "a.yaml", f"{YAML}{more}\n") is None


def test_a_name_of_many_parts_in_toml_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'a.toml' can't be read .a line has more than 200 dots.; correct it"):
        read(tmp_path, "a.toml", f"{TOML}[{'.'.join('a' * 300)}]\n")


@POSIX
def test_a_folder_whose_name_is_no_utf8_has_archives_and_a_ledger(tmp_path):
    folder = tmp_path / os.fsdecode(b"photos\xff")
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(picture := folder / "a.png")
    with zipfile.ZipFile(archive := folder / "more.zip", "w") as file:
        file.write(picture, "b.png")
    assert (unpack(archive, tmp_path / "cache", lambda: None).folder / "b.png").is_file()
    assert Ledger(tmp_path / "ledger").find(picture) is None

"""The parts of dev.py that decide what is taken for whole and what is unpacked."""

import io
import os
import sys
import tarfile
from pathlib import Path

import pytest

dev = sys.modules["tessera_dev"]


def archive(path: Path, files: dict[str, bytes], links: tuple[str, ...] = ()) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
            tar.addfile(member)
    return path


def comfyui(folder: Path) -> Path:
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").write_text("")
    (folder / "comfy" / "sd.py").write_text("")
    (folder / "requirements.txt").write_text("torch\n")
    return folder


def test_only_files_below_the_wanted_folder_are_unpacked(tmp_path):
    source = archive(
        tmp_path / "a.tar.gz",
        {"p-1/vendor/ComfyUI/main.py": b"main", "p-1/vendor/ComfyUI/comfy/sd.py": b"sd", "p-1/setup.py": b"no"},
        links=("p-1/vendor/ComfyUI/link",),
    )
    dev.unpack(source, "vendor/ComfyUI", tmp_path / "out")
    found = {str(p.relative_to(tmp_path / "out").as_posix()) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == {"main.py", "comfy/sd.py"}
    assert (tmp_path / "out" / "main.py").read_bytes() == b"main"


@pytest.mark.parametrize("name", ["../../evil.py", "a/../../../evil.py", "..\\evil.py", "C:evil.py"])
def test_a_name_that_leads_out_of_the_folder_is_refused_and_leaves_nothing(name, tmp_path):
    source = archive(
        tmp_path / "a.tar.gz", {"p-1/vendor/ComfyUI/main.py": b"ok", f"p-1/vendor/ComfyUI/{name}": b"evil"}
    )
    with pytest.raises(SystemExit, match="not safe to unpack"):
        dev.unpack(source, "vendor/ComfyUI", tmp_path / "deep" / "out")
    assert not list(tmp_path.rglob("evil.py")) and not (tmp_path / "deep" / "out").exists()
    assert not list((tmp_path / "deep").iterdir())


def test_a_broken_archive_leaves_nothing_that_could_be_taken_for_whole(tmp_path):
    source = archive(
        tmp_path / "a.tar.gz", {"p-1/vendor/ComfyUI/main.py": b"x", "p-1/vendor/ComfyUI/b": os.urandom(9999)}
    )
    source.write_bytes(source.read_bytes()[:5000])
    with pytest.raises((EOFError, tarfile.ReadError)):
        dev.unpack(source, "vendor/ComfyUI", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_archive_of_another_hash_is_refused(tmp_path):
    file = tmp_path / "a.tar.gz"
    file.write_bytes(b"other")
    with pytest.raises(SystemExit, match="not the release that was pinned"):
        dev.check_sha256(file, dev.COMFYUI_SHA256)
    dev.check_sha256(file, "d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa")


def test_the_environment_key_changes_with_each_requirements_file(tmp_path, monkeypatch):
    path = comfyui(tmp_path / "comfyui")
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    (tmp_path / "requirements.txt").write_text("a\n")
    (tmp_path / "requirements-dev.txt").write_text("b\n")
    keys = [dev.environment_key(path)]
    assert dev.environment_key(path) == keys[0]
    for file in (path / "requirements.txt", tmp_path / "requirements.txt", tmp_path / "requirements-dev.txt"):
        file.write_text(file.read_text() + "more\n")
        keys.append(dev.environment_key(path))
    assert len(set(keys)) == 4


def test_an_environment_without_its_stamp_is_not_taken_for_whole(tmp_path):
    python = dev.venv_python(tmp_path)
    python.parent.mkdir()
    python.touch()
    assert not dev.is_complete(tmp_path)
    (tmp_path / dev.STAMP).touch()
    assert dev.is_complete(tmp_path)
    python.unlink()
    assert not dev.is_complete(tmp_path)


def test_an_environment_that_is_whole_is_used_without_installing_anything(tmp_path, monkeypatch):
    path = comfyui(tmp_path / "comfyui")
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    monkeypatch.delenv("TESSERA_PYTHON", raising=False)
    commands: list[list[str]] = []

    def install(command, **_):
        commands.append(command)
        if len(commands) == 1:
            raise SystemExit(1)

    def make_venv(folder):
        python = dev.venv_python(folder)
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()
        return python

    monkeypatch.setattr(dev, "run", install)
    monkeypatch.setattr(dev, "make_venv", make_venv)
    with pytest.raises(SystemExit):
        dev.python_of_environment(path)
    assert len(commands) == 1
    python = dev.python_of_environment(path)
    assert len(commands) == 3 and Path(python).exists()
    assert dev.python_of_environment(path) == python
    assert len(commands) == 3


def test_comfyui_path_comes_first_and_must_hold_a_comfyui(tmp_path, monkeypatch):
    path = comfyui(tmp_path / "comfyui")
    monkeypatch.setenv("COMFYUI_PATH", str(path))
    assert dev.find_comfyui() == path
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="holds no ComfyUI"):
        dev.find_comfyui()


def test_the_comfyui_that_the_pack_sits_in_is_used_before_the_pinned_one(tmp_path, monkeypatch):
    path = comfyui(tmp_path / "comfyui")
    pack = path / "custom_nodes" / "tessera"
    pack.mkdir(parents=True)
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dev, "ROOT", pack)
    assert dev.find_comfyui() == path
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="dev.py setup"):
        dev.find_comfyui()
    comfyui(dev.unpacked_comfyui())
    assert dev.find_comfyui() == dev.unpacked_comfyui()

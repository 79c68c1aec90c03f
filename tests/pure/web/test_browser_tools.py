"""Linter and types of the browser's code: what is installed is pinned, and every module is checked against types."""

import json
import re
import shutil

import pytest
from with_pack import ROOT, load

check = load("browser_check", ROOT / "tools" / "browser" / "check.py")


def test_packages_are_pinned_and_come_from_whatever_registry_npm_has():
    text = (check.HERE / "package-lock.json").read_text(encoding="utf-8")
    packages = json.loads(text)["packages"]
    dependencies = json.loads((check.HERE / "package.json").read_text(encoding="utf-8"))["devDependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in dependencies.values())
    assert {name: packages[f"node_modules/{name}"]["version"] for name in dependencies} == dependencies
    assert "://" not in text and "resolved" not in text
    assert all(package["integrity"] for path, package in packages.items() if path)


def test_other_packages_get_another_folder(tmp_path, monkeypatch):
    folder = check.tools_folder(tmp_path)
    monkeypatch.setattr(check, "HERE", tmp_path)
    for name in check.PACKAGES:
        shutil.copy(ROOT / "tools" / "browser" / name, tmp_path)
    assert check.tools_folder(tmp_path) == folder
    (tmp_path / "package-lock.json").write_text("{}")
    assert check.tools_folder(tmp_path) != folder


def test_imports_of_the_code_are_there_where_it_is_checked(tmp_path):
    check.lay_out(tmp_path)
    files = sorted((tmp_path / check.CHECKED).rglob("*.js"))
    assert len(files) == len(list((ROOT / check.CHECKED).rglob("*.js"))) > 30
    for file in files:
        for name in re.findall(r"^import .*?from '(.+?)'$", file.read_text(encoding="utf-8"), re.MULTILINE):
            module = (file.parent / name).resolve()
            assert module.is_file() or module.with_suffix(".d.ts").is_file(), f"{file}: {name}"


@pytest.mark.parametrize("name", check.COMMANDS)
def test_a_tool_is_one_of_the_packages(name):
    package = check.COMMANDS[name][0].partition("/")[0]
    assert f"node_modules/{package}" in (check.HERE / "package-lock.json").read_text(encoding="utf-8")


def test_every_class_of_the_style_sheet_is_used_and_every_class_has_a_rule():
    rules = set(re.findall(r"\.(tessera-[\w-]+)", (ROOT / "nodes" / "web" / "tessera.css").read_text(encoding="utf-8")))
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / check.CHECKED).rglob("*.js"))
    used = set(re.findall(r"(?<![\w/]\.)\b(tessera-[\w-]+)", code))
    assert len(rules) > 50 and used - rules == {"tessera-leave-out"} and rules <= used  # by which tests find a button

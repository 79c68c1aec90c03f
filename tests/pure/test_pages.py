"""The pages for developers name what is there: every path exists, every folder of the pack has its line."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACK = ("nodes", "train", "data", "lora", "compile", "models", "memory", "common")
PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)*/?)`")


def named_paths(page: str) -> set[str]:
    """Paths in code marks: each ends with a slash or a suffix, or has a slash within."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return {path for path in PATH.findall(text) if "/" in path or re.search(r"\.(py|md|toml|json)$", path)}


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_path_that_a_page_names_exists(page):
    paths = named_paths(page)
    assert len(paths) > 15
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, missing


def test_the_architecture_names_every_folder():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    folders = {
        f"{folder.relative_to(ROOT).as_posix()}/"
        for top in PACK
        for folder in [ROOT / top, *(ROOT / top).rglob("*")]
        if folder.is_dir() and list(folder.glob("*.py"))
    }
    assert len(folders) > 30
    listed = set(re.findall(r"^\| `([\w/]+/)` \|", text, re.MULTILINE))
    assert folders <= listed, folders - listed


def test_every_benchmark_has_a_question_and_a_page():
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+\? \| (.+) \|$", text, re.MULTILINE)
    files = [file for file in (ROOT / "benchmarks").glob("*/*.py") if "__main__" in file.read_text(encoding="utf-8")]
    # `dev.py card` runs the card's; a contestant and a worker are started by other scripts.
    assert {name for name, _ in rows} == {file.stem for file in files} - {"contestant", "worker"} | {"card"}
    links = [link for _, pages in rows for link in re.findall(r"\]\(([^)#]+)", pages)]
    assert len(links) > 20 and not [link for link in links if not (ROOT / "benchmarks" / link).exists()]


def test_the_moving_commits_are_named_whole():
    lines = (ROOT / ".git-blame-ignore-revs").read_text(encoding="utf-8").splitlines()
    commits = [line for line in lines if line and not line.startswith("#")]
    assert len(commits) > 8
    assert all(re.fullmatch(r"[0-9a-f]{40}", commit) for commit in commits)


def test_the_readme_lists_every_workflow():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = " ".join(re.findall(r"^\| (`.+?`) \|", text, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", rows)) >= {path.stem for path in (ROOT / "workflows").glob("*.json")}


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_every_link_of_a_page_leads_to_a_file(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = {link for link in re.findall(r"\]\(([^)#]+)|(?:src|srcset)=\"([^\"]+)", text) for link in link if link}
    folder = (ROOT / page).parent
    assert [link for link in links if "://" not in link and not (folder / link).exists()] == []

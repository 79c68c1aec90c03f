"""The pack as the registry publishes it starts by itself, in a folder of another name."""

import fnmatch
import os
import shutil
from pathlib import Path

import pytest
from comfy_server import ComfyServer

ROOT = Path(__file__).resolve().parents[3]
FOLDER = "comfyui-tessera"


def left_out() -> list[str]:
    lines = (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()
    return [line.strip("/") for line in lines if line and not line.startswith("#")]


def published(folder: Path) -> None:
    """Copy what `.comfyignore` leaves, whose lines are paths from the root."""
    out = {*left_out(), ".git"}

    def ignored(folder: str, names: list[str]) -> set[str]:
        inside = Path(folder).relative_to(ROOT)
        return {n for n in names if (inside / n).as_posix() in out or fnmatch.fnmatch(n, "__pycache__") or n == ".kit"}

    shutil.copytree(ROOT, folder, ignore=ignored)


def test_every_line_of_what_is_left_out_names_a_path():
    assert [path for path in left_out() if not (ROOT / path).exists()] == []


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = ComfyServer(tmp_path_factory.mktemp("published"), Path(os.environ["COMFYUI_PATH"]))
    nodes = server.base / "custom_nodes"
    (nodes / "tessera").unlink()
    published(nodes / FOLDER)
    with server:
        yield server


def test_all_nodes_their_pages_and_the_templates_are_there_under_another_folder_name(server):
    assert not (server.base / "custom_nodes" / FOLDER / "tests").exists()
    nodes = {name: node for name, node in server.get("/object_info").items() if name.startswith("Tessera")}
    own_nodes = {name for name, node in nodes.items() if node["python_module"] == f"custom_nodes.{FOLDER}"}
    documented = {page.stem for page in (ROOT / "nodes" / "web" / "docs").glob("Tessera*.md")}
    assert own_nodes == documented
    extensions = [path for path in server.get("/extensions") if f"/{FOLDER}/" in path]
    assert sorted(Path(path).name for path in extensions if "/docs/" not in path) == sorted(
        path.name for path in (ROOT / "nodes" / "web").rglob("*.js") if "docs" not in path.parts
    )
    templates = server.get("/workflow_templates")[FOLDER]
    assert sorted(templates) == sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
    assert "Traceback" not in server.log.read_text(errors="replace")

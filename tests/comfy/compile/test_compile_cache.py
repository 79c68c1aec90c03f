"""Graphs compiled in one process and found by the next: real processes, real inductor, a tiny Wan."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tessera.compile.cache import FOLDER, use_persistent_cache

SUPPORT = Path(__file__).resolve().parents[2] / "support"

# A session of a user in a process of its own: the pack under the name in argv, the cache folder, a checkpoint.
SESSION = """
import importlib, json, os, sys
from pathlib import Path
support, pack, folder, checkpoint = sys.argv[1:]
sys.path.insert(0, support)
import with_comfyui
with_comfyui.load(pack, with_comfyui.ROOT / "__init__.py")
cache, attach, settings, events = (
    importlib.import_module(f"{pack}.compile.{n}") for n in ("cache", "attach", "settings", "report.events")
)
import torch

said = cache.use_persistent_cache(Path(folder))
chosen = settings.CompileSettings(dynamic="false")
model, compiled = attach.compile_model(with_comfyui.tiny.load_wan(checkpoint), chosen)
with_comfyui.tiny.sample(model, "wan", width=32, height=32, length=8, steps=1)
found = [event for region in compiled.report().regions for event in region.events]
restarted = torch.compile(lambda x, eps: torch.nn.functional.layer_norm(x, (4,), eps=eps), dynamic=True)
with torch.inference_mode(), events.recording("restarted") as record:
    restarted(torch.ones(2, 4), 1e-5)
with_comfyui.pytest_unconfigure()
names = ("graphs", "tracing_seconds", "fx_hits", "fx_misses", "aot_hits", "aot_misses", "bypassed")
print(json.dumps({
    "said": said,
    "regions": [{name: getattr(event, name) for name in names} for event in found],
    "restarted": {name: getattr(record.event, name) for name in names},
}))
"""


def session(folder: Path, checkpoint: Path, pack: str, **environment: str) -> dict:
    settings = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHINDUCTOR", "TRITON"))}
    arguments = [sys.executable, "-c", SESSION, str(SUPPORT), pack, str(folder), str(checkpoint)]
    process = subprocess.run(
        arguments, env=settings | environment, capture_output=True, text=True, timeout=900, cwd=checkpoint.parent
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    import tiny

    folder = tmp_path_factory.mktemp("session")
    checkpoint = tiny.write_wan(folder / "wan.safetensors", layers=1)
    return folder / "cache", [session(folder / "cache", checkpoint, pack) for pack in ("tessera", "another_folder")]


def test_the_first_process_compiles_and_keeps_it_in_the_folder(two_processes):
    folder, (first, _) = two_processes
    assert first["said"] == f"Compiled graphs are saved in {folder}."
    counts = [(r["graphs"], r["fx_hits"], r["fx_misses"], r["aot_hits"], r["aot_misses"]) for r in first["regions"]]
    assert counts == [(1, 0, 1, 0, 1)]
    assert {"fxgraph", "aotautograd"} <= {path.name for path in folder.iterdir()}


def test_the_second_process_misses_nothing_under_another_name_of_the_pack(two_processes):
    _, (_, second) = two_processes
    counts = [(r["graphs"], r["fx_hits"], r["fx_misses"], r["aot_hits"], r["aot_misses"]) for r in second["regions"]]
    assert counts == [(1, 1, 0, 1, 0)]
    assert all(r["bypassed"] == 0 for r in second["regions"])


def test_tracing_which_no_cache_saves_is_told_apart(two_processes):
    for process in two_processes[1]:
        assert all(region["tracing_seconds"] > 0 for region in process["regions"])


def test_a_trace_that_dynamo_gave_up_is_no_miss(two_processes):
    """A number that turns out to be fixed makes dynamo begin again, and no process finds the trace before."""
    first, second = (process["restarted"] for process in two_processes[1])
    assert (first["graphs"], first["fx_misses"], first["aot_misses"]) == (1, 1, 1)
    assert (second["graphs"], second["fx_misses"], second["aot_hits"], second["aot_misses"]) == (1, 0, 1, 0)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """As torch leaves it when the pack is imported and the user has set nothing."""
    monkeypatch.setenv(FOLDER, os.path.join(tempfile.gettempdir(), "torchinductor_somebody"))
    return monkeypatch


def test_the_folder_replaces_torchs_own(tmp_path):
    said = use_persistent_cache(tmp_path / "user" / "cache")
    assert said == f"Compiled graphs are saved in {tmp_path / 'user' / 'cache'}."
    assert os.environ[FOLDER] == str(tmp_path / "user" / "cache") and (tmp_path / "user" / "cache").is_dir()
    assert use_persistent_cache(tmp_path / "user" / "cache") == said


def test_the_folder_is_taken_where_nothing_is_set_yet(tmp_path, environment):
    environment.delenv(FOLDER)
    use_persistent_cache(tmp_path / "cache")
    assert os.environ[FOLDER] == str(tmp_path / "cache")


def test_a_folder_of_the_users_own_stays(tmp_path, environment):
    environment.setenv(FOLDER, str(tmp_path / "mine"))
    said = use_persistent_cache(tmp_path / "cache")
    assert said == f"Compiled graphs are saved in {tmp_path / 'mine'}, as TORCHINDUCTOR_CACHE_DIR asks."
    assert os.environ[FOLDER] == str(tmp_path / "mine") and not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_is_said_and_torchs_own_stays(tmp_path):
    folder = os.environ[FOLDER]
    (tmp_path / "file").write_text("")
    said = use_persistent_cache(tmp_path / "file" / "cache")
    assert "can't be written" in said and os.environ[FOLDER] == folder


@pytest.mark.parametrize(
    ("module", "name", "value", "said"),
    [
        ("torch.compiler.config", "force_disable_caches", True, "switched off, so every start compiles again."),
        (
            "torch._inductor.config",
            "fx_graph_cache",
            False,
            "inductor's (TORCHINDUCTOR_FX_GRAPH_CACHE=1 switches it on).",
        ),
        (
            "torch._functorch.config",
            "enable_autograd_cache",
            False,
            "AOTAutograd's (TORCHINDUCTOR_AUTOGRAD_CACHE=1 switches it on).",
        ),
    ],
)
def test_a_cache_that_is_switched_off_is_said(tmp_path, module, name, value, said):
    import importlib

    with importlib.import_module(module).patch({name: value}):
        assert use_persistent_cache(tmp_path / "cache").endswith(said)

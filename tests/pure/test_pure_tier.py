"""The tests of this folder load neither torch nor ComfyUI, and a run of them fails where one does."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("loaded", ["torch", "comfy", "json"])
def test_a_test_that_loads_torch_or_comfyui_fails_the_run_of_the_folder(tmp_path, loaded):
    if loaded != "json":
        (tmp_path / f"{loaded}.py").touch()
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    import {loaded}\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == (loaded != "json"), process.stdout
    assert (f"A test of tests/pure loaded {loaded};" in process.stdout) == (loaded != "json")

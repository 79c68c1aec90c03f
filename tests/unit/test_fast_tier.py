"""Tests of each family that `dev.py test --fast` runs."""

import os
import re
import subprocess
import sys

import pytest
from family_cases import CASES
from tessera.models.catalogue.registry import FAMILIES
from tessera_dev import FAST_TESTS, ROOT, find_comfyui


@pytest.fixture(scope="module")
def marked() -> dict[str, set[str]]:
    """The families that have a case in the fast tier, by the file of the case."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "fast",
        *FAST_TESTS,
    ]
    environment = os.environ | {"COMFYUI_PATH": str(find_comfyui())}
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert process.returncode == 0, process.stdout + process.stderr
    names = "|".join(sorted(CASES, key=len, reverse=True))
    families: dict[str, set[str]] = {}
    for file, name in re.findall(rf"(test_\w+)\.py::\w+\[({names})\b", process.stdout):
        families.setdefault(file, set()).add(CASES[name].family)
    return families


@pytest.mark.parametrize("file", ["test_gradients", "test_resume", "test_swap", "test_graphs", "test_lora_files"])
def test_each_family_takes_a_step_resumes_swaps_compiles_and_saves_in_the_fast_tier(file, marked):
    assert marked[file] == {family.name for family in FAMILIES}

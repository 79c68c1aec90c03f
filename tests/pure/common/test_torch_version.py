"""The oldest torch: README and pyproject name it, and an older one is told as the pack is loaded."""

import re
import sys
from pathlib import Path

import pytest
from tessera.common.torch_version import OLDEST, check_torch, copies_addend

ROOT = Path(sys.modules["tessera_dev"].__file__).parent
NAMED = ".".join(map(str, OLDEST))


@pytest.mark.parametrize(
    "version", [f"{NAMED}.0", f"{NAMED}.0+cu130", "2.14.0", "3.0.0a0+git1", "a build of one's own"]
)
def test_a_torch_that_is_new_enough_passes(version):
    check_torch(version)


@pytest.mark.parametrize("version", ["2.10.0", "2.8.0+cu128", "1.13.1", "2.9.0a0+git1"])
def test_an_older_torch_is_a_sentence(version):
    with pytest.raises(RuntimeError) as error:
        check_torch(version)
    assert str(error.value) == f"Tessera needs torch {NAMED} or newer, and ComfyUI runs with {version}; update torch."


def test_the_pages_and_the_package_name_it():
    assert f"torch {NAMED} or newer" in (ROOT / "README.md").read_text("utf-8")
    match = re.search(r'^torch = \["torch>=(.+)"\]$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert match and match[1] == NAMED


def test_products_are_added_to_without_a_copy_from_2_14_on():
    copying = [v for v in ("2.11.0+cu130", "2.13.1", "2.14.0", "3.0.0a0", "a build of one's own") if copies_addend(v)]
    assert copying == ["2.11.0+cu130", "2.13.1"]

"""Imports the pack under the name `tessera`, without torch and without ComfyUI.

The pack's root is itself a package with relative imports, so it is never put on sys.path: it is loaded by its path,
as ComfyUI does. dev.py and tests/server.py are loaded the same way, as `tessera_dev` and `comfy_server`.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


def load(name: str, file: Path) -> ModuleType:
    """Import `file` as `name`; an `__init__.py` becomes a package with the submodules of its folder."""
    folders = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


dev = load("tessera_dev", ROOT / "dev.py")
load("tessera", ROOT / "__init__.py")
comfy_server = load("comfy_server", TESTS / "server.py")

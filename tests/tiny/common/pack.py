"""The makers of tiny models that the pack itself has, `models/try_it`, as the package `tessera_try_it`.

Loaded by its path: the demo has no pack, and in a server the pack has another name.
"""

import importlib.util
import sys
from pathlib import Path

NAME = "tessera_try_it"

if NAME not in sys.modules:
    folder = Path(__file__).resolve().parents[3] / "models" / "try_it"
    spec = importlib.util.spec_from_file_location(
        NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])

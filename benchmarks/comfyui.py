"""Find, set up and import ComfyUI and the pack for a benchmark, without the node API or the server, which a bare GPU
machine does not have."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load(name: str, file: Path) -> ModuleType:
    """Import `file` as `name`; an `__init__.py` becomes a package with the submodules of its folder."""
    folders = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_tiny_writers() -> ModuleType:
    """tests/tiny, which needs no ComfyUI to write its files."""
    return sys.modules.get("tiny") or load("tiny", ROOT / "tests" / "tiny" / "__init__.py")


def set_up_comfyui(device: str) -> None:
    """Put ComfyUI on the path with its options set, and import the pack as `tessera`."""
    command = sys.argv[:]
    sys.argv[1:] = []  # ComfyUI reads the command line at import; this one is ours
    sys.path.insert(0, str(load("tessera_dev", ROOT / "dev.py").find_comfyui()))
    from comfy.cli_args import args

    sys.argv[:] = command
    args.cpu = device in ("cpu", "meta")
    args.use_pytorch_cross_attention = True
    # The pack's entry point imports the node API; a plain package over the same folder is enough here.
    pack = sys.modules["tessera"] = ModuleType("tessera")
    pack.__path__ = [str(ROOT)]
    load_tiny_writers()


def importable_without_nodes() -> bool:
    """Return whether the pack's training code was loaded without ComfyUI's node API, as a bare GPU machine needs it."""
    return not any(name == "comfy_api" or name.startswith("comfy_api.") for name in sys.modules)

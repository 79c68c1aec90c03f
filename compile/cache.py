"""Persistent compile cache, so that the next start of ComfyUI finds its graphs."""

import os
import tempfile
from pathlib import Path

# Holds the graphs of inductor and AOTAutograd, and Triton's kernels in a subfolder unless TRITON_CACHE_DIR is set.
FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def use_persistent_cache(folder: Path) -> str:
    """Let torch cache its graphs in `folder`, and return a sentence on the folder in use.

    A folder set by the user is kept. Torch's default is in the system's temporary folder, which gets emptied. Call it
    before anything is compiled: torch reads its folder at each cache lookup, but Triton's only once.
    """
    env_folder = os.environ.get(FOLDER)
    if env_folder and not _is_torchs_own(env_folder) and Path(env_folder) != folder.absolute():
        return f"Compiled graphs are saved in {env_folder}, as {FOLDER} asks{_except_for()}."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return (
            f"Compiled graphs are lost when the system's temporary folder is emptied, since {folder} can't be written "
            f"({error.strerror or error}); set {FOLDER} to a folder that can."
        )
    os.environ[FOLDER] = str(folder.absolute())
    return f"Compiled graphs are saved in {folder.absolute()}{_except_for()}."


def _is_torchs_own(folder: str) -> bool:
    """Return True for torch's default folder.

    Torch writes it into the environment when its compiler is first imported.
    """
    path = Path(folder)
    return path.parent == Path(tempfile.gettempdir()).absolute() and path.name.startswith("torchinductor_")


def _except_for() -> str:
    """Name the caches that the user or this torch has switched off."""
    import torch._functorch.config
    import torch._inductor.config

    inductor, autograd = torch._inductor.config, torch._functorch.config
    if getattr(inductor, "force_disable_caches", False):
        return ", but torch's caches are switched off, so every start compiles again"
    disabled = [
        f"{cache} ({switch}=1 switches it on)"
        for cache, enabled, switch in (
            ("inductor's", getattr(inductor, "fx_graph_cache", False), "TORCHINDUCTOR_FX_GRAPH_CACHE"),
            ("AOTAutograd's", getattr(autograd, "enable_autograd_cache", False), "TORCHINDUCTOR_AUTOGRAD_CACHE"),
        )
        if not enabled
    ]
    return f", except for {' and '.join(disabled)}" if disabled else ""

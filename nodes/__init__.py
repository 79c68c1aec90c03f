"""The nodes, and the only code that knows ComfyUI's node API and its server."""

import logging
from pathlib import Path

import folder_paths
from comfy_api.latest import ComfyExtension, io

from ..compile.cache import use_persistent_cache
from . import (
    average,
    compare,
    compile,
    data,
    loaders,
    memory,
    objective,
    optimizer,
    options,
    output,
    preview,
    swap,
    train,
    tune,
    validation,
)

log = logging.getLogger(__name__)

NODES: list[type[io.ComfyNode]] = [
    *loaders.NODES,
    *swap.NODES,
    *compile.NODES,
    *tune.NODES,
    *data.NODES,
    *options.NODES,
    *optimizer.NODES,
    *objective.NODES,
    *memory.NODES,
    *preview.NODES,
    *validation.NODES,
    *train.NODES,
    *output.NODES,
    *compare.NODES,
    *average.NODES,
]


class TesseraExtension(ComfyExtension):
    async def on_load(self) -> None:
        """Before any node can compile."""
        log.info(use_persistent_cache(Path(folder_paths.get_user_directory(), "tessera", "compile_cache")))

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES

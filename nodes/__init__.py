"""The nodes: the only code that uses ComfyUI's node API and server."""

import logging
from pathlib import Path

import folder_paths
from comfy_api.latest import ComfyExtension, io
from server import PromptServer

from ..common.core import features
from ..compile.cache import use_persistent_cache
from ..models.layers.attention import settle_kernel_order
from .captions import caption_folder
from .captions import routes as caption_routes
from .common.types import refuse_literals
from .data import concepts, folder_routes, prepare
from .loras import average, compare, loss_by_picture, save, tools
from .loras import load as load_lora
from .model import block_swap, compile, load, try_it, tune
from .options import memory, network, objective, optimizer, preview, validation
from .queue import queue_routes
from .review import check_folder, mask_folder, mask_routes
from .train import run_deletion, run_files, run_routes, train_lora, training_estimate

log = logging.getLogger(__name__)

NODES: list[type[io.ComfyNode]] = [
    *load.NODES,
    *block_swap.NODES,
    *compile.NODES,
    *tune.NODES,
    *prepare.NODES,
    *concepts.NODES,
    *check_folder.NODES,
    *mask_folder.NODES,
    *caption_folder.NODES,
    *network.NODES,
    *optimizer.NODES,
    *objective.NODES,
    *memory.NODES,
    *preview.NODES,
    *validation.NODES,
    *train_lora.NODES,
    *training_estimate.NODES,
    *save.NODES,
    *loss_by_picture.NODES,
    *load_lora.NODES,
    *compare.NODES,
    *average.NODES,
    *tools.NODES,
    *try_it.NODES,
]

for _node in NODES:
    refuse_literals(_node)


class TesseraExtension(ComfyExtension):
    async def on_load(self) -> None:
        """Set up attention and the compile cache before any node can compile, and add the routes."""
        log.info("Tessera finds in ComfyUI: %s", features())
        settle_kernel_order()
        server = getattr(PromptServer, "instance", None)
        if server is not None:  # None under run.py
            routes = (run_routes, run_files, run_deletion, folder_routes, caption_routes, mask_routes, queue_routes)
            for module in routes:
                module.add_routes(server.routes)
        log.info(use_persistent_cache(Path(folder_paths.get_user_directory(), "tessera", "compile_cache")))

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES

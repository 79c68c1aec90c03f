"""The nodes, and the only code that knows ComfyUI's node API and its server."""

from comfy_api.latest import ComfyExtension, io

from . import data, loaders, options, output, train

NODES: list[type[io.ComfyNode]] = [*loaders.NODES, *data.NODES, *options.NODES, *train.NODES, *output.NODES]


class TesseraExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES

"""Tessera: LoRA training, compilation and block swap inside ComfyUI."""

WEB_DIRECTORY = "./nodes/web"


async def comfy_entrypoint():
    import torch

    from .common.torch_version import check_torch

    check_torch(torch.__version__)  # before anything is imported that an older one may not have
    from .nodes import TesseraExtension

    return TesseraExtension()

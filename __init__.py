"""Tessera: LoRA training, compilation and block swap inside ComfyUI."""

WEB_DIRECTORY = "./nodes/web"


async def comfy_entrypoint():
    from .nodes import TesseraExtension

    return TesseraExtension()

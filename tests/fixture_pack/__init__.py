"""Nodes for the demo and the tests only: they load what ComfyUI's own loaders cannot load at a tiny size.

While this pack is installed, ComfyUI's detection also takes the sizes that a tiny diffusion model's file names itself
(tests/tiny/models/injection.py), so that every loader node, core's and ours, loads a tiny Qwen-Image.

Load CLIP has the types of newer ComfyUIs that the shared workflows name, though it can load nothing of theirs.

Whatever counts its steps waits at the one that the file `hold` in the base folder names, until the file is gone: what
breaks in on a run comes in time however fast the run is.

`python dev.py serve` names in TESSERA_OPENS the workflow that the first visit of the page opens.
"""

import importlib.util
import math
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import comfy.model_detection
import comfy.utils
import folder_paths
import nodes
from aiohttp import web
from comfy_api.latest import ComfyExtension, io
from server import PromptServer


def _load_tiny() -> ModuleType:
    """tests/tiny, which lies beside the folder that this pack is a link to."""
    file = Path(__file__).resolve().parent.parent / "tiny" / "__init__.py"
    spec = importlib.util.spec_from_file_location("tessera_tiny", file, submodule_search_locations=[str(file.parent)])
    assert spec is not None and spec.loader is not None
    module = sys.modules["tessera_tiny"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiny = _load_tiny()
comfy.model_detection.model_config_from_unet = tiny.tiny_detection(comfy.model_detection.model_config_from_unet)


NEWER_CLIP_TYPES = ("flux3",)
_clip_inputs = nodes.CLIPLoader.INPUT_TYPES


def _with_newer_types(_: type) -> dict[str, Any]:
    inputs: dict[str, Any] = _clip_inputs()
    types, *options = inputs["required"]["type"]
    inputs["required"]["type"] = ([*types, *(kind for kind in NEWER_CLIP_TYPES if kind not in types)], *options)
    return inputs


nodes.CLIPLoader.INPUT_TYPES = classmethod(_with_newer_types)


def _last_step() -> float:
    try:
        return float(Path(folder_paths.base_path, "hold").read_text())
    except FileNotFoundError:
        return math.inf


def _holding(update_absolute: Any) -> Any:
    def update(self: Any, value: int, *args: Any, **kwargs: Any) -> None:
        update_absolute(self, value, *args, **kwargs)
        while value >= _last_step():
            time.sleep(0.01)

    return update


comfy.utils.ProgressBar.update_absolute = _holding(comfy.utils.ProgressBar.update_absolute)


def _text_encoder(name: str) -> Path:
    return Path(folder_paths.get_full_path_or_raise("text_encoders", name))


class TesseraTinyClipLoader(io.ComfyNode):
    """DualCLIPLoader for the tiny FLUX encoders and CLIPLoader for those of Wan, Qwen-Image and Chroma: the files'
    metadata says their sizes and, of one file, whose it is."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        encoders = folder_paths.get_filename_list("text_encoders")
        return io.Schema(
            node_id="TesseraTinyClipLoader",
            display_name="Load Tiny CLIP (tests)",
            category="Tessera/tests",
            inputs=[
                io.Combo.Input(
                    "clip_name1", options=encoders, tooltip="The tiny CLIP-L (FLUX), umT5 (Wan) or Qwen2.5-VL file."
                ),
                io.Combo.Input("clip_name2", options=encoders, optional=True, tooltip="The tiny T5 file (FLUX)."),
            ],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(cls, clip_name1: str, clip_name2: str | None = None) -> io.NodeOutput:
        if clip_name2 is None:
            return io.NodeOutput(tiny.load_text_encoder(_text_encoder(clip_name1)))
        return io.NodeOutput(tiny.load_clip(_text_encoder(clip_name1), _text_encoder(clip_name2)))


class TesseraTinyEncoders(io.ComfyNode):
    """The tiny encoders of an edit model, of FLUX.2 and of Wan I2V, which no loader of core's can load so small."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraTinyEncoders",
            display_name="Load Tiny Encoders (tests)",
            category="Tessera/tests",
            inputs=[
                io.String.Input("qwen", default="", tooltip="The tiny Qwen2.5-VL file, to which eyes are given."),
                io.Boolean.Input("flux2", default=False, tooltip="FLUX.2 klein's text encoder and VAE."),
                io.Boolean.Input("clip_vision", default=False, tooltip="A CLIP vision model of the real width."),
            ],
            outputs=[io.Clip.Output(), io.Vae.Output(), io.ClipVision.Output()],
        )

    @classmethod
    def execute(cls, qwen: str, flux2: bool, clip_vision: bool) -> io.NodeOutput:
        from tessera_tiny.data import image_encoders

        clip = image_encoders.load_klein_clip() if flux2 else None
        if qwen:
            clip = image_encoders.load_seeing_qwen_clip(_text_encoder(qwen))
        vae = image_encoders.load_flux2_vae() if flux2 else None
        return io.NodeOutput(clip, vae, image_encoders.load_clip_vision(1280) if clip_vision else None)


class TesseraTinyNative(io.ComfyNode):
    """A tiny model that trains with ComfyUI's own forward, with its encoders and VAE."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraTinyNative",
            display_name="Load Tiny Checkpoint (tests)",
            category="Tessera/tests",
            inputs=[io.String.Input("name", default="z-image", tooltip="A name in tests/tiny/native/loaded.py.")],
            outputs=[io.Model.Output(), io.Clip.Output(), io.Vae.Output(), io.Vae.Output(id="sound")],
        )

    @classmethod
    def execute(cls, name: str) -> io.NodeOutput:
        from tessera_tiny.native.loaded import load_native

        folder = Path(folder_paths.get_temp_directory())
        folder.mkdir(parents=True, exist_ok=True)  # a process over the same folders removes it when it ends
        loaded = load_native(name, folder)
        return io.NodeOutput(*loaded, *[None] * (4 - len(loaded)))


def _open_first(template: str) -> Any:
    """Lead the first visit of the page to a workflow of the pack; later ones find what was open."""
    waiting = [f"/?template={template}&source=tessera"]

    @web.middleware
    async def open_once(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == "/" and not request.query_string and waiting:
            raise web.HTTPFound(waiting.pop())
        return await handler(request)

    return open_once


@web.middleware
async def _assets_kept(request: web.Request, handler: Any) -> web.StreamResponse:
    """Let browsers keep the frontend's assets, whose names change with their content, from page to page."""
    response: web.StreamResponse = await handler(request)
    if request.path.startswith("/assets/"):
        response.headers.setdefault("Cache-Control", "public, max-age=86400, immutable")
    return response


class FixtureExtension(ComfyExtension):
    async def on_load(self) -> None:
        PromptServer.instance.app.middlewares.append(_assets_kept)
        if template := os.environ.get("TESSERA_OPENS"):
            PromptServer.instance.app.middlewares.append(_open_first(template))

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [TesseraTinyClipLoader, TesseraTinyEncoders, TesseraTinyNative]


async def comfy_entrypoint() -> FixtureExtension:
    return FixtureExtension()

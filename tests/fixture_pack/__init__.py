"""Nodes for the demo and the tests only: they load what ComfyUI's own loaders cannot load at a tiny size."""

import json

import comfy.sd
import folder_paths
from comfy_api.latest import ComfyExtension, io
from safetensors import safe_open


class TesseraTinyClipLoader(io.ComfyNode):
    """DualCLIPLoader for the tiny FLUX encoders, whose sizes stand in their files' metadata."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        encoders = folder_paths.get_filename_list("text_encoders")
        return io.Schema(
            node_id="TesseraTinyClipLoader",
            display_name="Load Tiny CLIP (tests)",
            category="Tessera/tests",
            inputs=[
                io.Combo.Input("clip_name1", options=encoders, tooltip="The tiny CLIP-L file."),
                io.Combo.Input("clip_name2", options=encoders, tooltip="The tiny T5 file."),
            ],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(cls, clip_name1: str, clip_name2: str) -> io.NodeOutput:
        paths = [folder_paths.get_full_path_or_raise("text_encoders", name) for name in (clip_name1, clip_name2)]
        options: dict = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                options |= json.loads((file.metadata() or {})["tessera_tiny"])
        clip = comfy.sd.load_clip(
            paths,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            clip_type=comfy.sd.CLIPType.FLUX,
            model_options=options,
        )
        return io.NodeOutput(clip)


class FixtureExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [TesseraTinyClipLoader]


async def comfy_entrypoint() -> FixtureExtension:
    return FixtureExtension()

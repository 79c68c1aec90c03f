"""Load LoRA File: any LoRA file as a LORA_MODEL."""

from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

from ...lora.files.loading import load_lora
from ...lora.source import read_lora_file
from ...models.catalogue.registry import family_of
from ..common.types import LoraModelType
from ..options.lora_files import lora_file_fingerprint, lora_files, lora_path


class TesseraLoadLora(io.ComfyNode):
    """Reads a LoRA file in the names of any trainer, for Save LoRA, Compare LoRAs and other nodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraLoadLora",
            display_name="Load LoRA File (Tessera)",
            category="Tessera/output",
            description="Reads a LoRA file of any trainer, in whatever names it has. Save LoRA behind it writes it in "
            "another format.",
            search_aliases=["convert lora", "lora converter", "lora format", "import lora"],
            inputs=[
                io.Combo.Input(
                    "lora_file",
                    options=lora_files(),
                    tooltip="The file, from ComfyUI's LoRA folders. Press R to see new ones.",
                ),
                io.Model.Input(
                    "model",
                    tooltip="The model that the LoRA is for, from any loader. Its layers say what the names in the "
                    "file mean; it isn't changed.",
                ),
            ],
            outputs=[
                LoraModelType.Output(display_name="lora", tooltip="For Save LoRA, Compare LoRAs or Load LoRA Model."),
                io.String.Output(
                    display_name="report", tooltip="How many layers were read, and what was left out of the file."
                ),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, lora_file: str | None = None, **_: Any) -> object:
        return lora_file_fingerprint(lora_file)

    @classmethod
    def execute(cls, lora_file: str, model: ModelPatcher) -> io.NodeOutput:
        with torch.inference_mode(False):
            tensors, metadata = read_lora_file(lora_path("lora_file", lora_file), "lora_file")
            lora, notes = load_lora(tensors, metadata, family_of(model), model.model, f"lora_file: {lora_file}")
        return io.NodeOutput(lora, "\n".join(notes), ui={"tessera": [{"notes": notes}]})


NODES: list[type[io.ComfyNode]] = [TesseraLoadLora]

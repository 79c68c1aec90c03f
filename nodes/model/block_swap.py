"""Block Swap, and its inputs that Training Memory shares."""

from collections.abc import Sequence
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

from ...memory.host.pinning import PIN_MEMORY
from ...models.catalogue.swapped_model import SwapSettings, swap
from .compile import check_is_diffusion_model


def swap_inputs(default: int, optional: bool = False) -> list[Any]:
    """Build blocks_to_swap, prefetch_blocks and pin_memory, shared by Block Swap and Training Memory."""
    return [
        io.Int.Input(
            "blocks_to_swap",
            default=default,
            min=-1,
            max=1000,
            optional=optional,
            tooltip="How many of the model's blocks stay in RAM and stream to the GPU when they are needed. 0: none. "
            "-1: as many as needed to fit the free GPU memory. Raise it if memory runs out.",
        ),
        io.Int.Input(
            "prefetch_blocks",
            default=SwapSettings.prefetch_blocks,
            min=1,
            max=16,
            optional=optional,
            advanced=True,
            tooltip="How many blocks are copied ahead. Each one takes the GPU memory of one more block. Raise it to "
            "2 if the GPU waits for copies. With blocks_to_swap -1 this is the minimum, and up to 3 may be chosen.",
        ),
        io.Combo.Input(
            "pin_memory",
            options=list(PIN_MEMORY),
            default=SwapSettings.pin_memory,
            optional=optional,
            advanced=True,
            tooltip="Puts the swapped blocks into page-locked RAM, where copies are fastest. auto: when it is safe. "
            "on: even if RAM is short and they would otherwise stream from the file. off: only a small page-locked "
            "buffer; choose it if Windows runs short of memory.",
        ),
    ]


class TesseraBlockSwap(io.ComfyNode):
    """The MODEL with some of its blocks streamed from the host."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraBlockSwap",
            display_name="Block Swap",
            category="Tessera/loaders",
            description="Keeps part of a diffusion model in RAM and streams it to the GPU when needed, for sampling "
            "and for Train LoRA. The pictures are the same.",
            search_aliases=["block swap", "offload", "low vram", "blocks to swap"],
            has_intermediate_output=True,  # its notes are sent again on a cache hit
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="The diffusion model, from any loader. LoRAs and Compile Model can come after this node.",
                ),
                *swap_inputs(default=-1),
            ],
            outputs=[io.Model.Output(tooltip="The model, for a LoRA loader, Compile Model, a sampler or Train LoRA.")],
        )

    @classmethod
    def execute(cls, model: ModelPatcher, blocks_to_swap: int, prefetch_blocks: int, pin_memory: str) -> io.NodeOutput:
        check_is_diffusion_model(model)
        return with_swap(model, SwapSettings(blocks_to_swap, prefetch_blocks, pin_memory))


def with_swap(model: ModelPatcher, settings: SwapSettings, first: Sequence[str] = ()) -> io.NodeOutput:
    """Attach block swap to a MODEL; the chosen plan is shown on the node and in /history.

    first: notes to show before it.
    """
    with torch.inference_mode(False):
        swapped, notes = swap(model, settings)
    notes[:0] = first
    # The list itself, not a copy: notes added when the blocks are placed then reach /history too.
    return io.NodeOutput(swapped, ui={"tessera": [{"notes": notes}]})


NODES = [TesseraBlockSwap]

"""Load Diffusion Model, for sampling and training."""

from typing import Any

import folder_paths
import torch
from comfy import sd
from comfy_api.latest import io
from safetensors import SafetensorError

from ...common.core import load_without_dynamic_vram
from ...common.untrusted.tensor_files import open_tensors
from ...memory.host.mapped_file import KeepMapped, copy_into_ram
from ...memory.low_bit.quantize import AS_STORED, QUANTIZE
from ...memory.swap.selection import check_count
from ...memory.weights.dynamic_vram import cast_as_asked
from ...models.blocks import most_blocks
from ...models.catalogue.swapped_model import SwapSettings
from ...models.name_table import uncompiled
from .block_swap import swap_inputs, with_swap
from .model_file import SAFETENSORS, is_of_compiled, load_of_compiled, open_quantized, readable

WEIGHT_DTYPES = {
    "default": None,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fn_fast": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class TesseraLoadDiffusionModel(io.ComfyNode):
    """Loads a diffusion model outside inference mode, so that Train LoRA needs no copy of its weights.

    Some of its blocks may stream from the host.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraLoadDiffusionModel",
            display_name="Load Diffusion Model (Block Swap)",
            category="Tessera/loaders",
            description="Loads a diffusion model for sampling and for Train LoRA. If it is larger than the GPU's "
            "memory, set blocks_to_swap to -1 to stream part of its blocks from RAM.",
            search_aliases=["load unet", "load flux", "unet loader", "block swap", "offload", "low vram"],
            has_intermediate_output=True,  # its notes on block swap are sent again on a cache hit
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=folder_paths.get_filename_list("diffusion_models"),
                    tooltip="The model file, from ComfyUI's models/diffusion_models folder.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(WEIGHT_DTYPES),
                    default="default",
                    tooltip="The format of the weights. default uses the file's own format. fp8 halves the memory of "
                    "a bf16 file at some loss of detail; fp8_e4m3fn_fast also multiplies in fp8 when sampling, on "
                    "cards that can.",
                ),
                *swap_inputs(default=0, optional=True),
                io.Combo.Input(
                    "quantize",
                    options=list(QUANTIZE),
                    default=AS_STORED,
                    optional=True,
                    tooltip="Converts the block layers of a 16-bit file to 8 bit while loading: half the memory, and "
                    "half to stream. int8 is closer to the original (about 1 % off), fp8 about 2.5 %. Leave "
                    "weight_dtype at default.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model, for a sampler, a LoRA loader or Train LoRA.")],
        )

    @classmethod
    def validate_inputs(cls, unet_name: str | None = None) -> bool | str:
        if unet_name is None:  # missing, or linked: not known yet, and checked by execute
            return True
        if folder_paths.get_full_path("diffusion_models", unet_name) is None:
            return f"unet_name: there is no {unet_name} in models/diffusion_models; put it there, or choose another."
        return True

    @classmethod
    def execute(
        cls,
        unet_name: str,
        weight_dtype: str,
        blocks_to_swap: int = 0,
        prefetch_blocks: int = SwapSettings.prefetch_blocks,
        pin_memory: str = SwapSettings.pin_memory,
        quantize: str = AS_STORED,
    ) -> io.NodeOutput:
        options: dict[str, Any] = {}
        if (dtype := WEIGHT_DTYPES[weight_dtype]) is not None:
            options["dtype"] = dtype
        if weight_dtype == "fp8_e4m3fn_fast":
            options["fp8_optimizations"] = True
        _check_quantize(quantize, weight_dtype)
        path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
        # In the executor's inference mode, like core's loader: scaled fp8 weights made outside it can't be moved inside
        # it. Training views the same memory through ordinary tensors. Dynamic VRAM, which block swap replaces, would
        # load the file a second time.
        if blocks_to_swap == 0:
            with readable(unet_name):
                model, notes = _load(path, options, quantize, dynamic=True)
            return io.NodeOutput(model, ui={"tessera": [{"notes": notes}]})  # clears earlier notes on the node
        if blocks_to_swap != -1:
            _check_count(path, blocks_to_swap)
        # The host, whatever ComfyUI's options: under --highvram it would load the whole model onto the device.
        options["offload_device"] = torch.device("cpu")
        with KeepMapped() as mapped, readable(unet_name):
            model, notes = _load(path, options, quantize, dynamic=False)
        cast_as_asked(model.model)
        copy_into_ram(model.model)
        settings = SwapSettings(blocks_to_swap, prefetch_blocks, pin_memory)
        message = mapped.message() if quantize == AS_STORED else None  # 8-bit blocks are in RAM in any case
        return with_swap(model, settings, notes if message is None else [*notes, message])


def _check_quantize(quantize: str, weight_dtype: str) -> None:
    """Check that only one of two inputs sets the format of the weights. Raises ValueError."""
    if quantize != AS_STORED and weight_dtype != "default":
        raise ValueError(
            f"quantize is '{quantize}' and weight_dtype is '{weight_dtype}', but only one of them can choose the "
            "format of the weights; set weight_dtype to 'default'."
        )


def _load(path: str, options: dict[str, Any], quantize: str, dynamic: bool) -> tuple[Any, list[str]]:
    if quantize != AS_STORED:
        return open_quantized(path, options, quantize, dynamic)
    if is_of_compiled(path):
        return load_of_compiled(path, options, dynamic), []
    return (sd.load_diffusion_model if dynamic else load_without_dynamic_vram)(path, options), []


def _check_count(path: str, blocks_to_swap: int) -> None:
    """Check blocks_to_swap against the file's keys, before minutes of loading. Raises ValueError."""
    if not path.lower().endswith(SAFETENSORS):
        return
    try:
        with open_tensors(path) as file:
            names = [name for name in file.keys() if name.endswith(".weight")]
            matrices = [name for name in names if len(file.get_slice(name).get_shape()) > 1]
            max_blocks = most_blocks(uncompiled(name) for name in matrices)
    except SafetensorError:
        return  # loading reports the error
    if max_blocks:
        check_count(blocks_to_swap, max_blocks)


NODES = [TesseraLoadDiffusionModel]

"""Load Diffusion Model: for sampling and for training."""

from collections.abc import Iterator
from contextlib import contextmanager

import folder_paths
import torch
from comfy import sd
from comfy_api.latest import io
from safetensors import SafetensorError, safe_open

from ...common.core import load_of_compiled, load_without_dynamic_vram
from ...memory.host.mapped_file import KeepMapped, copy_into_ram
from ...memory.swap.selection import check_count
from ...memory.weights.dynamic_vram import cast_as_asked
from ...models.blocks import most_blocks
from ...models.name_table import uncompiled
from ...models.swapped_model import SwapSettings
from .block_swap import swap_inputs, with_swap

SAFETENSORS = (".safetensors", ".sft")
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
            description="Loads a diffusion model for sampling and for Train LoRA. Where it is larger than the GPU's "
            "memory, a part of its blocks can stream from the computer's memory: set blocks_to_swap to -1.",
            search_aliases=["load unet", "load flux", "unet loader", "block swap", "offload", "low vram"],
            has_intermediate_output=True,  # what it says of block swap is sent again where the node is cached
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
                    tooltip="How the weights are kept. default takes the file's own format. fp8 halves the memory of a "
                    "bf16 file at some loss of detail; fp8_e4m3fn_fast also multiplies in fp8 when sampling, on cards "
                    "that can.",
                ),
                *swap_inputs(default=0, optional=True),
            ],
            outputs=[io.Model.Output(tooltip="The model, for a sampler, a LoRA loader or Train LoRA.")],
        )

    @classmethod
    def validate_inputs(cls, unet_name: str | None = None) -> bool | str:
        if unet_name is None:  # linked: its value is not known yet, and execute checks it; or missing
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
    ) -> io.NodeOutput:
        options: dict = {}
        if (dtype := WEIGHT_DTYPES[weight_dtype]) is not None:
            options["dtype"] = dtype
        if weight_dtype == "fp8_e4m3fn_fast":
            options["fp8_optimizations"] = True
        path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
        # Under the executor's inference mode, as core's loader: scaled fp8 weights made outside of it can't be moved
        # under it. Training looks at the same memory through ordinary tensors. Dynamic VRAM, which block swap stands in
        # for, would load the file a second time.
        if blocks_to_swap == 0:
            with _readable(unet_name):
                load = load_of_compiled if _is_of_compiled(path) else sd.load_diffusion_model
                model = load(path, options)
            return io.NodeOutput(model, ui={"tessera": [{"notes": []}]})  # takes what was said before off the node
        if blocks_to_swap != -1:
            _check_count(path, blocks_to_swap)
        # The host, whatever ComfyUI was started with: under --highvram it would load the whole model onto the device.
        options["offload_device"] = torch.device("cpu")
        with KeepMapped() as mapped, _readable(unet_name):
            compiled = _is_of_compiled(path)
            model = load_of_compiled(path, options, True) if compiled else load_without_dynamic_vram(path, options)
        cast_as_asked(model.model)
        copy_into_ram(model.model)
        settings = SwapSettings(blocks_to_swap, prefetch_blocks, pin_memory)
        return with_swap(model, settings, mapped.message())


@contextmanager
def _readable(unet_name: str) -> Iterator[None]:
    """Turn errors of broken or foreign files into a ValueError that names the file."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"unet_name: {unet_name} can't be read as safetensors ({error}); it is damaged or was not downloaded to "
            "its end, so download it again."
        ) from error


def _is_of_compiled(path: str) -> bool:
    """Return True for a safetensors file that was saved from a model with torch.compile on it."""
    if not path.lower().endswith(SAFETENSORS):
        return False
    try:
        with safe_open(path, framework="pt") as file:
            return any("_orig_mod." in name for name in file.keys())
    except SafetensorError:
        return False  # loading says what is wrong with it


def _check_count(path: str, blocks_to_swap: int) -> None:
    """Check blocks_to_swap against the file's keys, before minutes of loading. Raises ValueError."""
    if not path.lower().endswith(SAFETENSORS):
        return
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.endswith(".weight")]
            matrices = [name for name in names if len(file.get_slice(name).get_shape()) > 1]
            most = most_blocks(uncompiled(name) for name in matrices)
    except SafetensorError:
        return  # loading says what is wrong with it
    if most:
        check_count(blocks_to_swap, most)


NODES = [TesseraLoadDiffusionModel]

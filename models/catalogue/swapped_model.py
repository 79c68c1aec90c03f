"""Block swap on a MODEL: its settings are attached to it, sampling streams its blocks, and training reads the
settings."""

from collections.abc import Sequence
from dataclasses import dataclass

import comfy.model_management
import psutil
from comfy.model_patcher import ModelPatcher
from torch import nn

from ...common.core import bytes_to_unload, usable_memory
from ...common.notes import Notes
from ...common.processes import processes_here
from ...common.text import quantity
from ...memory.host.file_speed import measure_file_bandwidth
from ...memory.host.flat_weights import parts_of
from ...memory.host.mapped_file import bytes_in_file
from ...memory.host.pinning import HostWeights, place_on_host
from ...memory.host.staging import link_bandwidth
from ...memory.swap.block_cost import BlockCost
from ...memory.swap.oom_retry import retry_on_oom
from ...memory.swap.patcher import SwapPatcher, swap_model
from ...memory.swap.plan import Hardware, SearchSpace, SwapPlan, memory_place, plan, prefetches
from ...memory.swap.selection import choose_blocks
from ...memory.weights.dynamic_vram import without_dynamic_vram
from ..blocks import BlockOfModel, find_blocks, list_of, lists_of, numbered
from .registry import FAMILIES

KEY = "tessera.swap_settings"
IMAGE_SIDE = 1024  # pixels per side of the image that -1 leaves room for


@dataclass(frozen=True)
class SwapSettings:
    """Settings of block swap.

    blocks_to_swap: the number of blocks that stream; -1 for as many as needed.
    prefetch_blocks: the number of blocks prefetched; with blocks_to_swap -1 the minimum.
    pin_memory: auto, on or off.
    """

    blocks_to_swap: int = 0
    prefetch_blocks: int = 1
    pin_memory: str = "auto"


def swap_settings_of(patcher: ModelPatcher) -> SwapSettings | None:
    """Return the settings that Load Diffusion Model or Block Swap has set on this MODEL."""
    return patcher.get_attachment(KEY)


def swap_order(patcher: ModelPatcher, blocks: Sequence[BlockOfModel]) -> list[str]:
    """Return the lists of blocks in the order in which they are swapped: the family's own, else the largest list
    first."""
    for family in FAMILIES:
        if family.matches(patcher.model):
            return list(family.forward.swap_order)
    size = {name: 0 for name in lists_of(blocks)}
    for block in blocks:
        size[list_of(block)] += sum(p.numel() * p.element_size() for p in block.module.parameters())
    return sorted(size, key=lambda name: -size[name])


def swap(patcher: ModelPatcher, settings: SwapSettings) -> tuple[ModelPatcher, Notes]:
    """Clone the MODEL with block swap. Also returns the notes for the user, which are logged too; the list grows when
    the blocks are placed.

    Raises ValueError for more blocks than the model has. Call it outside inference mode.
    """
    clone = without_dynamic_vram(patcher)
    if clone is None:
        return patcher.clone(), _one_note(
            "This MODEL uses ComfyUI's dynamic VRAM and its loader can't load it without, so ComfyUI streams it "
            "instead of block swap; load it with Load Diffusion Model (Block Swap)."
        )
    if isinstance(clone, SwapPatcher):
        raise ValueError(
            "model already has block swap, from Load Diffusion Model (Block Swap) or another Block Swap node; use "
            "only one of them."
        )
    clone.set_attachments(KEY, settings)
    blocks = find_blocks(clone.get_model_object("diffusion_model"))
    if not blocks:
        return clone, _one_note("Nothing is swapped: this model has no repeated blocks.")
    lists = lists_of(blocks)
    order = swap_order(clone, blocks)
    numbers = numbered(blocks)
    prefetch, notes = settings.prefetch_blocks, Notes()
    automatic = settings.blocks_to_swap == -1
    if automatic:
        # A prefetch below one is no choice; it is noted below.
        fitting = _fit(clone, numbers, order, prefetches(prefetch) if prefetch >= 1 else (1,), settings.pin_memory)
        swapped_names, prefetch = fitting.swapped, fitting.prefetch if prefetch >= 1 else prefetch
        notes.add(fitting.text)
    else:
        swapped_names = choose_blocks(settings.blocks_to_swap, {n: len(m) for n, m in lists.items()}, order)
    streamed = {
        f"diffusion_model.{block.name}": block.module for name, block in numbers.items() if name in swapped_names
    }
    if not streamed:
        if automatic:
            retry_on_oom(clone, automatic, notes.add)
        return clone, notes
    needed = sum(_bytes(module) for module in streamed.values())
    available = psutil.virtual_memory().available // processes_here()
    inside = bytes_in_file(tensor for module in streamed.values() for tensor in module.parameters())
    weights = HostWeights(needed, inside, sum(_bytes_on_device(module) for module in streamed.values()))
    placement = place_on_host(settings.pin_memory, clone.load_device.type, weights, available)
    for note in placement.notes:
        notes.add(note)
    swapped = swap_model(clone, streamed, prefetch, placement.pinned, placement.from_file, automatic)
    full_size, swapped_size = clone.model_size(), swapped.model_size()
    total = quantity(len(blocks), "block")
    notes.add(
        f"Block swap: {quantity(len(streamed), f'of {total} streams', f'of {total} stream')}; the model takes "
        f"{swapped_size / 2**30:.2f} GiB on the GPU instead of {full_size / 2**30:.2f} GiB."
    )
    shared_notes = swapped.notes  # only the list: a clone may be based on another model, and outlive this one
    shared_notes[:0] = notes
    retry_on_oom(swapped, automatic, shared_notes.add)
    return swapped, shared_notes


def _one_note(sentence: str) -> Notes:
    notes = Notes()
    notes.add(sentence)
    return notes


def _bytes(module: nn.Module) -> int:
    return comfy.model_management.module_size(module)


def _bytes_on_device(module: nn.Module) -> int:
    return sum(p.nbytes for tensor in module.parameters() for p in parts_of(tensor) if p.device.type != "cpu")


def _fit(
    patcher: ModelPatcher,
    blocks: dict[str, BlockOfModel],
    order: list[str],
    prefetch: tuple[int, ...],
    pin_memory: str,
) -> SwapPlan:
    """Plan the fewest streamed blocks with which the rest, plus the memory for a picture of one megapixel, fits into
    the device memory that ComfyUI may use, and the number of blocks to prefetch. blocks: by <list>.<index>, in the
    order of the forward; prefetch: the choices."""
    device = patcher.load_device
    available = psutil.virtual_memory().available
    weights = {name: list(block.module.parameters()) for name, block in blocks.items()}
    tensors = (w for parameters in weights.values() for w in parameters)
    file = measure_file_bandwidth(tensors, pin_memory, available, processes_here())
    in_file = {name: bytes_in_file(parameters) if file is not None else 0 for name, parameters in weights.items()}
    costs = [BlockCost(name, _bytes(block.module), in_file=in_file[name]) for name, block in blocks.items()]
    inside = sum(cost.weights for cost in costs)
    latent = patcher.model.latent_format
    side = IMAGE_SIDE // latent.spacial_downscale_ratio
    shape = [1, latent.latent_channels, side, side]
    other = patcher.model_size() - inside + int(patcher.memory_required(shape))
    free = usable_memory(patcher) + bytes_to_unload(device)
    machine = Hardware(int(free), link_bandwidth(device), available + inside, file, memory_place(device.type))
    return plan(costs, other, machine, order, SearchSpace(tuple(range(len(costs) + 1)), prefetch))

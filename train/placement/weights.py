"""Frozen weights of a run: on the device, but those of swapped blocks on the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from comfy.model_patcher import ModelPatcher

from ...memory.host.mapped_file import bytes_in_file
from ...memory.host.pinning import HostPlacement, HostWeights, place_on_host
from ...memory.swap.selection import choose_blocks
from ...memory.swap.sharded import Peers, ShardedSwap
from ...memory.swap.training import BlockSwap, frozen_modules
from ...memory.weights.residency import Holder, ResidentWeights
from ...models.family import Block, Family, Transformer
from ..blocks.low_bit_policy import LowBitPolicy
from ..config.settings import MemoryOptions
from .quantize_notes import quantize_notes


class PlacedWeights:
    """Frozen weights on the device and the host, and the transformer that computes with them.

    transformer: set by `build`, like the next four.
    swap: the block swap; None if no blocks are swapped.
    host: memory that the swapped blocks take on the host; None without any.
    quantize_notes: sentences on the effect of `quantize`.
    resident: the weights on the device, as ComfyUI's memory management sees them; set by `make_resident`.
    """

    transformer: Transformer
    resident: ResidentWeights | None = None
    _before_block: Callable[[], None] | None = None

    def __init__(self, patcher: ModelPatcher, family: Family, low_bit: LowBitPolicy, host_memory: Callable[[], int]):
        """host_memory: returns the bytes of the host's memory that this process may use."""
        self.patcher = patcher
        self.family = family
        self.low_bit = low_bit
        self.host_memory = host_memory
        self.device, self.dtype = patcher.load_device, patcher.model.get_dtype_inference()
        self.swap: BlockSwap | None = None
        self.host: HostPlacement | None = None
        self.quantize_notes: list[str] = []

    def build(self, memory: MemoryOptions, peers: Peers | None) -> None:
        """Build the transformer with its weights on the device, those of swapped blocks on the host.

        peers: ranks that share the swapped blocks; None without any.
        """
        self.host = None
        swapped = choose_blocks(
            memory.blocks_to_swap, self.family.forward.block_lists(self.patcher.model), self.family.forward.swap_order
        )
        transformer = self.family.forward.build(
            self.patcher, self.device, self.dtype, memory.attention, swapped, memory.quantize
        )
        self.low_bit.set(transformer.blocks())
        on_host = swapped if peers is None else ()
        self.quantize_notes = list(quantize_notes(memory.quantize, transformer.blocks(), on_host))
        blocks = [block for name, block in transformer.blocks() if name in swapped]
        swap = self._swapped(blocks, memory, peers) if swapped else None
        self.transformer, self.swap = transformer, swap

    def _swapped(self, blocks: list[Block], memory: MemoryOptions, peers: Peers | None) -> BlockSwap:
        """Move the weights of the blocks to the host."""
        if peers is not None:
            return ShardedSwap(blocks, self.device, memory.prefetch_blocks, peers)
        needed = sum(m.held_bytes() for block in blocks for m in frozen_modules(block).values())
        available = self.host_memory()
        inside = bytes_in_file(tensor for block in blocks for tensor in block.buffers())
        host = place_on_host(memory.pin_memory, self.device.type, HostWeights(needed, inside), available)
        self.host = host
        return BlockSwap(blocks, self.device, memory.prefetch_blocks, host.pinned, host.from_file)

    def holders(self) -> list[Holder]:
        """List the holders of device memory for frozen weights: modules, and the block swap for its blocks."""
        if self.swap is None:
            return list(self.transformer.frozen_modules())
        swapped = {id(m) for block in self.swap.blocks for m in frozen_modules(block).values()}
        return [*(m for m in self.transformer.frozen_modules() if id(m) not in swapped), self.swap]

    def make_resident(self) -> None:
        """Enter the weights on the device into ComfyUI's list of loaded models."""
        self.resident = ResidentWeights(self.holders(), self.device, self.patcher.offload_device)

    def ensure(self) -> None:
        """Load the weights again if another model has taken their place since the last step."""
        assert self.resident is not None
        self.resident.ensure()

    def on_device(self, function: Callable[..., Any], block: Block, *args: Any) -> Any:
        """Call a function on a block and its arguments with the block's weights on the device."""
        if self._before_block is not None:
            self._before_block()
        if self.swap is not None and id(block) in self.swap.number:
            return self.swap.run(function, block, *args)
        return function(block, *args)

    @contextmanager
    def before_blocks(self, call: Callable[[], None]) -> Iterator[None]:
        """Call a function, which may raise, before each run of a block in this context."""
        self._before_block = call
        try:
            yield
        finally:
            self._before_block = None

    def copies(self) -> int:
        """Count the block copies to the device since the weights were last placed."""
        return self.swap.ring.copies if self.swap else 0

    def unload(self) -> None:
        """Free the weights on the device and remove them from ComfyUI's list of loaded models."""
        if self.resident is not None:
            self.resident.release()

    def clear(self) -> None:
        """Free the weights on the device, and drop our references to those on the host.

        Only ComfyUI's modules hold those then, and moving one frees it.
        """
        assert self.resident is not None
        self.resident.clear()
        self.swap = None

    def close(self) -> None:
        """Free all memory of the weights."""
        self.unload()
        del self.resident, self.swap, self.transformer

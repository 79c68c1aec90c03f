"""Where weights and activations lie while a LoRA is trained."""

from dataclasses import dataclass

from ..common.text import finite, one_of, within
from ..memory.host.pinning import PIN_MEMORY

CHECKPOINTING = ("none", "selective", "full", "auto")
ATTENTION = ("auto", "sdpa", "flash-attn")


@dataclass(frozen=True)
class MemoryOptions:
    """What is kept for backward, which attention kernel runs and which weights stay on the host (TESSERA_MEMORY).

    `checkpointing` 'auto' takes the fastest that fits. `activation_budget` is read by selective checkpointing only: the
    part of the activations that is kept, 0 to 1. `blocks_to_swap` blocks stream from the host (-1: as many as have to),
    `prefetch_blocks` of them are copied ahead; `pin_memory` says whether their host memory is page-locked.
    `offload_activations` keeps on the host what full checkpointing keeps of each block.
    """

    checkpointing: str = "full"
    attention: str = "auto"
    activation_budget: float = 0.5
    blocks_to_swap: int = 0
    prefetch_blocks: int = 1
    pin_memory: str = "auto"
    offload_activations: bool = False

    def __post_init__(self) -> None:
        finite(self)
        one_of("checkpointing", self.checkpointing, CHECKPOINTING)
        one_of("attention", self.attention, ATTENTION)
        within("activation_budget", self.activation_budget, 0.0, 1.0)
        if self.blocks_to_swap < -1:
            raise ValueError(
                f"blocks_to_swap is {self.blocks_to_swap}; set it to -1 (fit to the free memory), 0 (none) or more."
            )
        if self.prefetch_blocks < 1:
            raise ValueError(f"prefetch_blocks is {self.prefetch_blocks}; set it to 1 or more.")
        one_of("pin_memory", self.pin_memory, PIN_MEMORY)

"""Training Memory: checkpointing, attention, block swap, offload, low_bit_matmul, quantize, shard and verify."""

from comfy_api.latest import io

from ...memory.low_bit.matmul import LOW_BIT_MATMULS
from ...memory.low_bit.quantize import QUANTIZE
from ...train.config.settings import ATTENTION, CHECKPOINTING, VERIFY, MemoryOptions
from ..common.types import MemoryType
from ..model.block_swap import swap_inputs


class TesseraMemory(io.ComfyNode):
    """Options that trade memory for time."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraMemory",
            display_name="Training Memory",
            category="Tessera/training",
            description="Trades memory against speed. Connect it to Train LoRA.",
            search_aliases=["gradient checkpointing", "vram", "flash attention"],
            inputs=[
                io.Combo.Input(
                    "checkpointing",
                    options=list(CHECKPOINTING),
                    default=MemoryOptions.checkpointing,
                    tooltip="Saves memory by computing parts of the forward pass again. full: every block, least "
                    "memory, about 40% slower. selective: as much as activation_budget says. none: nothing, "
                    "fastest, most memory. auto: the fastest that fits, measured at the start. The result is the "
                    "same except for rounding.",
                ),
                io.Combo.Input(
                    "attention",
                    options=list(ATTENTION),
                    default=MemoryOptions.attention,
                    tooltip="The attention kernel. auto and sdpa: PyTorch's own, which picks one by the card. "
                    "flash-attn: FlashAttention 2, 3 or 4, which has to be installed. cudnn: cuDNN's.",
                ),
                io.Float.Input(
                    "activation_budget",
                    default=MemoryOptions.activation_budget,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    round=False,
                    optional=True,
                    advanced=True,
                    tooltip="For selective checkpointing only: how much of the activations stays in memory, 0 (least "
                    "memory) to 1 (fastest).",
                ),
                *swap_inputs(default=MemoryOptions.blocks_to_swap, optional=True),
                io.Boolean.Input(
                    "offload_activations",
                    default=MemoryOptions.offload_activations,
                    optional=True,
                    tooltip="Moves what full checkpointing saves of each block to RAM. Switch it on for large "
                    "pictures or batches that don't fit otherwise.",
                ),
                io.Combo.Input(
                    "low_bit_matmul",
                    options=list(LOW_BIT_MATMULS),
                    default=MemoryOptions.low_bit_matmul,
                    optional=True,
                    tooltip="How the model's frozen layers multiply. off: in 16 bits, however they are stored. int8 "
                    "and fp8: in 8 bits, directly from 8-bit weights; faster on cards that support it well, and a "
                    "little less exact. auto: chosen by the card.",
                ),
                io.Combo.Input(
                    "quantize",
                    options=list(QUANTIZE),
                    default=MemoryOptions.quantize,
                    optional=True,
                    tooltip="Converts the frozen layers of a 16-bit model while it trains; the model itself and "
                    "previews don't change. int8 and fp8 need half the memory; int8 is closer to the original.",
                ),
                io.Boolean.Input(
                    "shard",
                    default=MemoryOptions.shard,
                    optional=True,
                    tooltip="For a run on several GPUs of one machine: each keeps a part of every swapped block, and "
                    "blocks come from all GPUs in place of the computer's memory. For a model that is too large for "
                    "each of them. Needs NCCL and blocks_to_swap.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "verify",
                    options=list(VERIFY),
                    default=MemoryOptions.verify,
                    optional=True,
                    advanced=True,
                    tooltip="Checks before the first step that gradients, swapped and compiled blocks and the saved "
                    "LoRA are right for this model, and stops where they aren't. auto: only for models that aren't "
                    "known by name. on: always. off: never. It takes about as long as 30 small steps.",
                ),
            ],
            outputs=[MemoryType.Output(display_name="memory")],
        )

    @classmethod
    def execute(  # noqa: PLR0913
        cls,
        checkpointing: str,
        attention: str,
        activation_budget: float = MemoryOptions.activation_budget,
        blocks_to_swap: int = MemoryOptions.blocks_to_swap,
        prefetch_blocks: int = MemoryOptions.prefetch_blocks,
        pin_memory: str = MemoryOptions.pin_memory,
        offload_activations: bool = MemoryOptions.offload_activations,
        low_bit_matmul: str = MemoryOptions.low_bit_matmul,
        quantize: str = MemoryOptions.quantize,
        shard: bool = MemoryOptions.shard,
        verify: str = MemoryOptions.verify,
    ) -> io.NodeOutput:
        options = MemoryOptions(
            checkpointing,
            attention,
            activation_budget,
            blocks_to_swap,
            prefetch_blocks,
            pin_memory,
            offload_activations,
            low_bit_matmul,
            quantize,
            shard,
            verify,
        )
        return io.NodeOutput(options)


NODES: list[type[io.ComfyNode]] = [TesseraMemory]

"""Settings inherited from the incoming MODEL and from connected options nodes, with notes for the user."""

from dataclasses import replace

from comfy.model_patcher import ModelPatcher

from ...compile.attach import compiled_model_of
from ...compile.settings import CompileSettings
from ...lora.options import SAME
from ...models.catalogue.swapped_model import swap_settings_of
from ...train.config.settings import MemoryOptions, TrainSettings


def overridden_notes(settings: TrainSettings, rank: int, learning_rate: float) -> list[str]:
    """List notes on inputs of Train LoRA that a connected options node replaces."""
    notes = []
    if settings.network.rank != rank:
        notes.append(f"rank is {settings.network.rank} (from the connected LoRA Network), not {rank}.")
    if settings.optimizer.learning_rate != learning_rate:
        notes.append(
            f"learning_rate is {settings.optimizer.learning_rate:g} (from the connected Optimizer), "
            f"not {learning_rate:g}."
        )
    return notes


def shared_lora_notes(settings: TrainSettings) -> list[str]:
    """List notes on LoRAs shared by both experts."""
    network = settings.network
    loras = {name: getattr(network, name) for name in ("start_from", "base_lora", "training_adapter")}
    return [
        f"{name} {lora.name} is used for both experts; to give the low noise one its own, set {name}_low_noise on "
        "LoRA Network."
        for name, lora in loras.items()
        if lora is not None and getattr(network, f"{name}_low_noise") == SAME
    ]


def inherited_memory(model: ModelPatcher, options: MemoryOptions) -> tuple[MemoryOptions, list[str]]:
    """Merge the MODEL's block swap into the memory options. Returns them with notes.

    A connected Training Memory that swaps blocks itself takes precedence.
    """
    swap = swap_settings_of(model)
    if swap is None or swap.blocks_to_swap == 0:
        return options, []
    if options.blocks_to_swap != 0:
        return options, [
            f"blocks_to_swap is {options.blocks_to_swap} (from the connected Training Memory), not "
            f"{swap.blocks_to_swap} as set on the MODEL."
        ]
    merged = replace(
        options,
        blocks_to_swap=swap.blocks_to_swap,
        prefetch_blocks=swap.prefetch_blocks,
        pin_memory=swap.pin_memory,
    )
    return merged, [f"blocks_to_swap is {swap.blocks_to_swap}, as set on the MODEL."]


def inherited_compile(model: ModelPatcher, compile: str) -> tuple[CompileSettings | None, list[str]]:
    """Return the compile settings inherited from an upstream Compile Model node, None without one, and notes."""
    compiled_model = compiled_model_of(model)
    if compiled_model is None or compile == "off":
        return None, []
    requested = compiled_model.settings
    notes = []
    inherited = CompileSettings(
        requested.backend, requested.mode, fullgraph=requested.fullgraph, overrides=requested.overrides
    )
    variants = [
        inherited.options(),
        *(override.apply(inherited.options()) for override in inherited.overrides if not override.eager),
    ]
    # Blocks of one kind share one callable, and a CUDA graph is bound to the addresses of one block's weights.
    for variant in dict.fromkeys(variant.without_cuda_graphs() for variant in variants if variant.cuda_graphs()):
        notes.append(
            f"Training doesn't use CUDA graphs, so it compiles with backend {variant.backend} and mode {variant.mode}."
        )
    base = inherited.options().without_cuda_graphs()
    return replace(inherited, backend=base.backend, mode=base.mode), list(dict.fromkeys(notes))

"""Settings inherited from the incoming MODEL and from connected options nodes, with notes for the user."""

from dataclasses import replace

from comfy.model_patcher import ModelPatcher

from ...compile.attach import compiled_model_of
from ...compile.settings import CompileSettings
from ...lora.options import SAME
from ...models.swapped_model import swap_settings_of
from ...train.settings import MemoryOptions, TrainSettings

_MEMORY = MemoryOptions()
_COMPILE = CompileSettings()


def overridden_notes(settings: TrainSettings, rank: int, learning_rate: float) -> list[str]:
    """Notes on inputs of Train LoRA that a connected options node replaces."""
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
    """Notes on LoRAs that both experts take, and on inputs without effect."""
    network = settings.network
    found = {name: getattr(network, name) for name in ("start_from", "base_lora", "training_adapter")}
    notes = [
        f"{name} {lora.name} is used for both experts; to give the low noise one its own, set {name}_low_noise on "
        "LoRA Network."
        for name, lora in found.items()
        if lora is not None and getattr(network, f"{name}_low_noise") == SAME
    ]
    for name, strength in (("base_lora", "base_strength"), ("training_adapter", "training_adapter_strength")):
        chosen = getattr(network, f"{name}_low_noise")
        if getattr(network, f"{strength}_low_noise") != 1 and isinstance(chosen, str):
            taken = f", which takes {strength}" if chosen == SAME else ""
            notes.append(f"{strength}_low_noise has no effect: {name}_low_noise is {chosen}{taken}.")
    return notes


def inherited_memory(model: ModelPatcher, options: MemoryOptions) -> tuple[MemoryOptions, list[str]]:
    """Merge the MODEL's block swap into the memory options. Returns them with notes.

    A connected Training Memory that swaps blocks itself wins.
    """
    swap = swap_settings_of(model)
    if swap is None or swap.blocks_to_swap == 0:
        return options, []
    if options.blocks_to_swap != 0:
        return options, [
            f"blocks_to_swap is {options.blocks_to_swap} (from the connected Training Memory), not "
            f"{swap.blocks_to_swap} as set on the MODEL."
        ]
    taken = replace(
        options,
        blocks_to_swap=swap.blocks_to_swap,
        prefetch_blocks=swap.prefetch_blocks,
        pin_memory=swap.pin_memory,
    )
    left = [name for name in ("prefetch_blocks", "pin_memory") if getattr(options, name) != getattr(_MEMORY, name)]
    notes = [f"blocks_to_swap is {swap.blocks_to_swap}, as set on the MODEL."]
    if left and any(getattr(options, name) != getattr(taken, name) for name in left):
        are = "is" if len(left) == 1 else "are"
        notes.append(
            f"{' and '.join(left)} of the connected Training Memory {are} not used: block swap is set on the MODEL; "
            "set blocks_to_swap on Training Memory too, or change it there."
        )
    return taken, notes


def inherited_compile(model: ModelPatcher, compile: str) -> tuple[CompileSettings | None, list[str]]:
    """Compile settings inherited from a Compile Model node in front, None without one. Returns them with notes."""
    compiled_model = compiled_model_of(model)
    if compiled_model is None:
        return None, []
    if compile == "off":
        return None, ["compile is off, so the Compile Model node in front has no effect on training."]
    asked = compiled_model.settings
    dynamic = [f"dynamic {asked.dynamic}"] if asked.dynamic == "true" else []
    if any(("dynamic", "true") in override.changes for override in asked.overrides):
        dynamic.append("dynamic true of overrides")
    unused = [
        *dynamic,
        *(
            [f"cache_size_limit {asked.cache_size_limit}"]
            if asked.cache_size_limit != _COMPILE.cache_size_limit
            else []
        ),
        *([f"scope {asked.scope}"] if asked.scope != _COMPILE.scope else []),
    ]
    notes = []
    if unused:
        notes.append(
            f"Of the Compile Model node {', '.join(unused)} {'is' if len(unused) == 1 else 'are'} ignored, because "
            "training compiles block by block for planned sizes."
        )
    taken = CompileSettings(asked.backend, asked.mode, fullgraph=asked.fullgraph, overrides=asked.overrides)
    hows = [taken.how(), *(override.apply(taken.how()) for override in taken.overrides if not override.eager)]
    # Blocks of one kind share one callable, and a CUDA graph is bound to the addresses of one block's weights.
    for how in dict.fromkeys(how.without_cuda_graphs() for how in hows if how.cuda_graphs()):
        notes.append(
            f"Training doesn't use CUDA graphs, so it compiles with backend {how.backend} and mode {how.mode}."
        )
    base = taken.how().without_cuda_graphs()
    return replace(taken, backend=base.backend, mode=base.mode), list(dict.fromkeys(notes))

"""Patches, wrappers and injections of other nodes on a MODEL, and what training does with each."""

from collections.abc import Iterable
from typing import Any

import comfy.lora
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from comfy.weight_adapter.bypass import BypassInjectionManager

from ..common.core import bypass_managers

# Wrappers that act around sampling, not on what the model computes.
_HARMLESS_WRAPPERS = {WrappersMP.OUTER_SAMPLE, WrappersMP.PREPARE_SAMPLING, WrappersMP.SAMPLER_SAMPLE}
# Keys of this pack's own wrappers: training takes the settings behind them.
_OURS = "tessera."


def trainable_model(patcher: ModelPatcher, own_forward: bool = True) -> tuple[ModelPatcher, tuple[str, ...]]:
    """Clone a MODEL for training; returns also a sentence for each thing on it that training leaves out.

    Weight patches (LoRAs) stay in force. LoRAs in bypass mode become weight patches. What changes the forward pass
    without changing weights (patches of the transformer, wrappers, attention overrides) is not part of our forward;
    where training runs ComfyUI's, it is refused.
    Raises ValueError for LoRAs that make a weight of another shape, for weight wrappers and for injections of unknown
    kind: they change the weights in a way that cannot be read.
    """
    clone = patcher.clone()
    notes: list[str] = []
    converted = 0
    for name, injections in list(clone.injections.items()):
        managers = [m for injection in injections for m in _managers(injection)]
        if len(managers) != len(injections):
            raise ValueError(
                f"model carries the injection {name!r}, which training can't apply; connect it without it."
            )
        for manager in managers:
            for module, (adapter, strength) in manager.adapters.items():
                converted += len(clone.add_patches({f"{module}.weight": adapter}, strength))
        clone.remove_injections(name)
    if converted:
        notes.append(f"{converted} bypass LoRA weights on the MODEL are applied as ordinary ones while it trains.")
    for key, patches in clone.patches.items():
        shape = tuple(comfy.utils.get_attr(clone.model, key).shape)
        if (wanted := tuple(comfy.lora.calculate_shape(patches, torch.empty(shape, device="meta"), key))) != shape:
            raise ValueError(
                f"model carries a LoRA that makes {key.removeprefix('diffusion_model.')} {wanted} of {shape}, as "
                "control LoRAs do; training can't apply that, so connect the model without it."
            )
    if clone.weight_wrapper_patches:
        raise ValueError("model carries weight wrappers, which training can't apply; connect it without them.")
    ignored = _ignored(clone)
    if ignored and not own_forward:
        carried = ignored[0].removesuffix(", which training leaves out.")
        raise ValueError(f"{carried}, which training of this model can't apply; connect it without that.")
    notes += ignored
    return clone, tuple(notes)


def _managers(injection: Any) -> list[BypassInjectionManager]:
    return [manager for manager in bypass_managers(injection) if isinstance(manager, BypassInjectionManager)]


def _ignored(patcher: ModelPatcher) -> list[str]:
    options = patcher.model_options.get("transformer_options", {})
    found = {
        _with_names("transformer patches", options.get("patches")): options.get("patches"),
        _with_names("replaced blocks", options.get("patches_replace")): options.get("patches_replace"),
        "an attention override": options.get("optimized_attention_override"),
        "a model function wrapper": patcher.model_options.get("model_function_wrapper"),
        "RoPE options": options.get("rope_options"),
    }
    for kind, wrappers in patcher.wrappers.items():
        of_others = [key for key, wrapper in wrappers.items() if wrapper and not str(key).startswith(_OURS)]
        found[f"{kind} wrappers"] = kind not in _HARMLESS_WRAPPERS and of_others
    others = [name for name in patcher.object_patches if name != "model_sampling"]
    found[_with_names("object patches", others)] = others
    return [f"The MODEL carries {what}, which training ignores." for what, there in found.items() if there]


def _with_names(what: str, names: Iterable[str] | None) -> str:
    return f"{what} ({', '.join(sorted(names or ()))})"

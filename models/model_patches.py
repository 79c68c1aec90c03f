"""Patches, wrappers and injections of other nodes on a MODEL, and their treatment in training."""

from collections.abc import Iterable
from typing import Any

import comfy.lora
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from comfy.weight_adapter.bypass import BypassInjectionManager

from ..common.core import bypass_managers
from ..common.text import quantity

# Wrappers around sampling that do not affect the model's computation.
_HARMLESS_WRAPPERS = {WrappersMP.OUTER_SAMPLE, WrappersMP.PREPARE_SAMPLING, WrappersMP.SAMPLER_SAMPLE}
# Keys of this pack's own wrappers: training reads the settings behind them.
_OURS = "tessera."


def trainable_model(patcher: ModelPatcher, own_forward: bool = True) -> tuple[ModelPatcher, tuple[str, ...]]:
    """Clone a MODEL for training. Also returns a sentence for each change on it that training ignores.

    Weight patches (LoRAs) stay active. LoRAs in bypass mode become weight patches. Patches that change the forward but
    no weights (transformer patches, wrappers, attention overrides) are not part of our forward; if training runs
    ComfyUI's, they are refused. Raises ValueError for LoRAs that make a weight of another shape, for weight wrappers
    and for injections of unknown kind: their effect on the weights can't be determined.
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
        singular = "bypass LoRA weight on the MODEL is applied as an ordinary one"
        plural = "bypass LoRA weights on the MODEL are applied as ordinary ones"
        notes.append(f"{quantity(converted, singular, plural)} while it trains.")
    for key, patches in clone.patches.items():
        shape = tuple(comfy.utils.get_attr(clone.model, key).shape)
        if (new_shape := tuple(comfy.lora.calculate_shape(patches, torch.empty(shape, device="meta"), key))) != shape:
            raise ValueError(
                f"model carries a LoRA that makes {key.removeprefix('diffusion_model.')} {new_shape} of {shape}, as "
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
    changes = {
        _with_names("transformer patches", options.get("patches")): options.get("patches"),
        _with_names("replaced blocks", options.get("patches_replace")): options.get("patches_replace"),
        "an attention override": options.get("optimized_attention_override"),
        "a model function wrapper": patcher.model_options.get("model_function_wrapper"),
        "RoPE options": options.get("rope_options"),
    }
    for kind, wrappers in patcher.wrappers.items():
        foreign_keys = [key for key, wrapper in wrappers.items() if wrapper and not str(key).startswith(_OURS)]
        changes[f"{kind} wrappers"] = kind not in _HARMLESS_WRAPPERS and foreign_keys
    object_patches = [name for name in patcher.object_patches if name != "model_sampling"]
    changes[_with_names("object patches", object_patches)] = object_patches
    return [
        f"The MODEL carries {description}, which training ignores." for description, patch in changes.items() if patch
    ]


def _with_names(description: str, names: Iterable[str] | None) -> str:
    return f"{description} ({', '.join(sorted(names or ()))})"

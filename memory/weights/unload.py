"""Some models are taken off their devices, while others stay."""

from collections.abc import Sequence

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher

from .frozen import puts_back_under_inference


def unload(models: Sequence[ModelPatcher]) -> None:
    """Takes these models and all clones of them off their devices, with their own weights in place of patched ones.
    Weights are put back under the inference mode that they bear, whichever it is called in."""
    management = comfy.model_management
    loaded = [entry for entry in management.current_loaded_models if entry.model is not None]
    ours = [entry for entry in loaded if any(entry.model.is_clone(model) for model in models)]
    for mode in (True, False):
        chosen = [entry for entry in ours if puts_back_under_inference(entry.model) == mode]
        others = [entry for entry in management.current_loaded_models if all(entry is not one for one in chosen)]
        with torch.inference_mode(mode):
            for device in {entry.device for entry in chosen}:
                management.free_memory(1e30, device, others)
    management.soft_empty_cache()

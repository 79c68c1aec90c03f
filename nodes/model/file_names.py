"""Names in a diffusion model's file, and what ComfyUI makes of them while it loads."""

from typing import Any

import comfy.model_detection
import comfy.utils
import torch
from torch import Tensor


def diffusion_model_tensors(tensors: dict[str, Tensor], metadata: Any) -> dict[str, Tensor] | None:
    """Give a file's tensors of the diffusion model by ComfyUI's names of them; None where they have others."""
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    own = comfy.utils.state_dict_prefix_replace(dict(tensors), {prefix: ""}, filter_keys=True) or dict(tensors)
    return None if comfy.model_detection.model_config_from_unet(own, "", metadata=metadata) is None else own


def linear_weights(tensors: dict[str, Tensor], metadata: Any) -> dict[str, str]:
    """Map each weight that a Linear of the diffusion model takes as it is, by its name in the file, to its name there.

    tensors: as `diffusion_model_tensors` gives them. Left out is what ComfyUI rearranges while it loads, and what it
    renames so that scales beside a weight would not follow it.
    """
    config = comfy.model_detection.model_config_from_unet(tensors, "", metadata=metadata)
    config.set_inference_dtype(torch.bfloat16, None)
    modules = dict(config.get_model(tensors, "", device=torch.device("meta")).diffusion_model.named_modules())

    def placed(given: dict[str, Tensor]) -> dict[int, str]:
        return {id(tensor): name for name, tensor in config.process_unet_state_dict(dict(given)).items()}

    after, weights = placed(tensors), {}
    for name, tensor in tensors.items():
        there = after.get(id(tensor), "")
        if name.endswith(".weight") and hasattr(modules.get(there.removesuffix(".weight")), "in_features"):
            weights[name] = there
    parts = ("weight_scale", "comfy_quant")
    beside = {f"{name.removesuffix('.weight')}.{part}": torch.empty(0) for name in weights for part in parts}
    after = placed(tensors | beside)

    def follows(name: str, part: str) -> bool:
        tensor = beside[f"{name.removesuffix('.weight')}.{part}"]
        return after.get(id(tensor)) == f"{weights[name].removesuffix('.weight')}.{part}"

    return {name: there for name, there in weights.items() if all(follows(name, part) for part in parts)}

"""Tensor names in a diffusion model's file, and ComfyUI's mapping of them on loading."""

from typing import Any

import comfy.model_detection
import comfy.utils
import torch
from torch import Tensor


def diffusion_model_tensors(tensors: dict[str, Tensor], metadata: Any) -> dict[str, Tensor] | None:
    """Return a file's tensors of the diffusion model by ComfyUI's names; None if it has other names."""
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    weights = comfy.utils.state_dict_prefix_replace(dict(tensors), {prefix: ""}, filter_keys=True) or dict(tensors)
    return None if comfy.model_detection.model_config_from_unet(weights, "", metadata=metadata) is None else weights


def linear_weights(tensors: dict[str, Tensor], metadata: Any) -> dict[str, str]:
    """Map names in the file, of the weights that Linears of the diffusion model take unchanged, to names in the model.

    tensors: as returned by `diffusion_model_tensors`. Excludes weights that ComfyUI rearranges on loading, and those
    renamed in a way that the scales of a weight would not follow.
    """
    config = comfy.model_detection.model_config_from_unet(tensors, "", metadata=metadata)
    config.set_inference_dtype(torch.bfloat16, None)
    modules = dict(config.get_model(tensors, "", device=torch.device("meta")).diffusion_model.named_modules())

    def placed(state_dict: dict[str, Tensor]) -> dict[int, str]:
        return {id(tensor): name for name, tensor in config.process_unet_state_dict(dict(state_dict)).items()}

    model_names, weights = placed(tensors), {}
    for name, tensor in tensors.items():
        model_name = model_names.get(id(tensor), "")
        if name.endswith(".weight") and hasattr(modules.get(model_name.removesuffix(".weight")), "in_features"):
            weights[name] = model_name
    parts = ("weight_scale", "comfy_quant")
    companions = {f"{name.removesuffix('.weight')}.{part}": torch.empty(0) for name in weights for part in parts}
    model_names = placed(tensors | companions)

    def follows(name: str, part: str) -> bool:
        tensor = companions[f"{name.removesuffix('.weight')}.{part}"]
        return model_names.get(id(tensor)) == f"{weights[name].removesuffix('.weight')}.{part}"

    return {name: model_name for name, model_name in weights.items() if all(follows(name, part) for part in parts)}

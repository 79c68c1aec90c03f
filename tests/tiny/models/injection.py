"""Sizes that ComfyUI's detection does not read from the weights, given to it by the tiny file's own metadata.

Qwen-Image's width is fixed in ComfyUI, and SDXL is known by its exact sizes. A file that names its class and sizes
under `SIZES` is loaded by the real loader with these, while `tiny_detection` stands in for ComfyUI's detection.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIZES = "tessera_tiny_unet"


def sizes_metadata(family: str, unet_config: Mapping[str, Any] | None = None) -> dict[str, str]:
    """`family` is a class of comfy.supported_models; `unet_config` overrides the sizes read from the weights."""
    return {SIZES: json.dumps({"family": family, "unet_config": dict(unet_config or {})})}


def tiny_detection(detect: Callable[..., Any]) -> Callable[..., Any]:
    """comfy.model_detection.model_config_from_unet, with the sizes in the metadata of tiny files."""

    def model_config_from_unet(
        state_dict: Any, prefix: str, use_base_if_no_match: bool = False, metadata: Mapping[str, str] | None = None
    ) -> Any:
        if SIZES not in (metadata or {}):
            return detect(state_dict, prefix, use_base_if_no_match, metadata=metadata)
        import comfy.model_detection
        import comfy.supported_models

        assert metadata is not None
        sizes = json.loads(metadata[SIZES])
        config = comfy.model_detection.detect_unet_config(state_dict, prefix, metadata=metadata)
        return getattr(comfy.supported_models, sizes["family"])(config | sizes["unet_config"])

    return model_config_from_unet


@contextmanager
def injected_sizes() -> Iterator[None]:
    import comfy.model_detection

    original = comfy.model_detection.model_config_from_unet
    comfy.model_detection.model_config_from_unet = tiny_detection(original)
    try:
        yield
    finally:
        comfy.model_detection.model_config_from_unet = original


def load_injected(path: str | Path, model_options: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return the MODEL that `UNETLoader` gives for this file, also when ComfyUI reloads it by itself."""
    import comfy.sd

    model_options = model_options or {}
    with injected_sizes():
        model = comfy.sd.load_diffusion_model(str(path), model_options=model_options, **options)
    model.cached_patcher_init = (load_injected, (str(path), model_options))
    return model

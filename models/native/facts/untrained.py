"""ComfyUI's models that make neither pictures nor video from a caption: Train LoRA refuses them by name."""

from typing import Any

# Class of comfy.supported_models → description of its purpose.
UNTRAINED: dict[str, str] = {
    "LotusD": "makes depth and normal maps of pictures",
    "Stable_Zero123": "multi-view: makes views of an object, without captions",
    "SDXLRefiner": "refines what SDXL leaves",
    "SD_X4Upscaler": "upscales",
    "Stable_Cascade_C": "makes codes for another model, on a schedule of its own",
    "Stable_Cascade_B": "decodes another model's codes, on a schedule of its own",
    "SV3D_u": "multi-view: makes views of an object, without captions",
    "SV3D_p": "multi-view: makes views of an object, without captions",
    "StableAudio3": "audio",
    "StableAudio": "audio",
    "HunyuanVideo15_SR_Distilled": "upscales",
    "HunyuanImage21Refiner": "refines",
    "PiD": "decodes latents into pixels and upscales",
    "WAN21_FlowRVS": "segmentation: makes masks of a video",
    "Hunyuan3Dv2mini": "3D",
    "Hunyuan3Dv2": "3D",
    "Hunyuan3Dv2_1": "3D",
    "TripoSplat": "3D",
    "SeedVR2": "upscales",
    "ACEStep": "audio",
    "ACEStep15": "audio",
    "RT_DETR_v4": "detection",
    "SAM3": "segmentation",
    "SAM31": "segmentation",
    "SVD_img2vid": "animates a picture without a caption; its frames are its batch",
    "DepthAnything3": "depth",
}

# Of newer ComfyUIs than the one that the tests run, by published sources (comfy/supported_models.py).
NEWER_UNTRAINED: dict[str, str] = {
    "MiniMaxMusic3": "audio",
    "YuE2": "audio",
    "Trellis2": "3D",
}


def why_untrained(model: Any) -> tuple[str, str] | None:
    """Return the name and the reason for a model that is not trained; None for any other.

    model: a ComfyUI BaseModel. A pack's class with the same name as core's is not core's.
    """
    config = type(getattr(model, "model_config", None))
    reasons = {**UNTRAINED, **NEWER_UNTRAINED}
    reason = reasons.get(config.__name__) if config.__module__ == "comfy.supported_models" else None
    return None if reason is None else (config.__name__, reason)

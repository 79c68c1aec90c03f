"""Wan's forwards: the one of its text-to-video model, and those of models that are conditioned on more."""

from types import SimpleNamespace
from typing import Any

import torch

from ..row import Draw, NativeRow
from .pictures import TEXT, WIDTH

WAN: dict[str, Any] = {
    "dim": 64,
    "ffn_dim": 96,
    "freq_dim": 32,
    "in_dim": 16,
    "out_dim": 16,
    "text_dim": WIDTH,
    "text_len": 16,
    "num_heads": 2,
    "num_layers": 2,
    "patch_size": (1, 2, 2),
    "window_size": (-1, -1),
    "qk_norm": True,
    "cross_attn_norm": True,
    "eps": 1e-6,
}
FRAMES = (16, 3, 8, 8)


def _picture(draw: Draw) -> dict[str, Any]:
    return {
        "clip_vision_output": SimpleNamespace(penultimate_hidden_states=draw(1, 5, 1280)),
        "concat_latent_image": draw(1, *FRAMES),
        "concat_mask": torch.cat([torch.zeros(1, 1, 1, 8, 8), torch.ones(1, 1, 2, 8, 8)], dim=2),
    }


def _control(draw: Draw) -> dict[str, Any]:
    return {"vace_frames": [draw(1, 32, 3, 8, 8)], "vace_mask": [draw(1, 64, 3, 8, 8)], "vace_strength": [1.0]}


def _camera(draw: Draw) -> dict[str, Any]:
    return {"camera_conditions": draw(1, 24, 3, 64, 64)}


def _spoken(draw: Draw) -> dict[str, Any]:
    return {"audio_embed": draw(1, 25, 32, 12), "reference_latents": [draw(1, 16, 1, 8, 8)]}


def _voice(draw: Draw) -> dict[str, Any]:
    return {"audio_embed": draw(1, 3, 8, 5, 8), "reference_latents": [draw(1, 16, 1, 8, 8)]}


def _music(draw: Draw) -> dict[str, Any]:
    return {"audio_embed": draw(1, 9, 35)}


def _pose(draw: Draw) -> dict[str, Any]:
    return {"reference_latents": [draw(1, 16, 1, 8, 8)], "pose_video_latent": draw(1, 16, 3, 4, 4)}


FURTHER = (
    NativeRow(name="wan", model="WAN21_T2V", tier="B", unet=WAN, latent=FRAMES, text=TEXT),
    NativeRow(name="wan-causal", model="WAN21_CausalAR_T2V", tier="B", unet=WAN, latent=FRAMES, text=TEXT),
    NativeRow(
        name="wan-i2v",
        model="WAN21_I2V",
        tier="B",
        unet=WAN | {"in_dim": 36},
        latent=FRAMES,
        text=TEXT,
        conditioning=_picture,
    ),
    NativeRow(
        name="wan-vace",
        model="WAN21_Vace",
        tier="B",
        unet=WAN | {"vace_layers": 1, "vace_in_dim": 96},
        latent=FRAMES,
        text=TEXT,
        conditioning=_control,
    ),
    NativeRow(
        name="wan-camera",
        model="WAN22_Camera",
        tier="B",
        unet=WAN | {"in_dim": 36},
        latent=FRAMES,
        text=TEXT,
        conditioning=_camera,
    ),
    NativeRow(
        name="wan-s2v",
        model="WAN22_S2V",
        tier="B",
        unet=WAN | {"audio_dim": 32, "audio_inject_layers": [0, 1]},
        latent=FRAMES,
        text=TEXT,
        conditioning=_spoken,
    ),
    NativeRow(
        name="wan-humo",
        model="WAN21_HuMo",
        tier="B",
        unet=WAN | {"audio_token_num": 4},
        latent=FRAMES,
        text=TEXT,
        conditioning=_voice,
        sizes={"comfy.ldm.wan.model.AudioProjModel": {"channels": 8, "intermediate_dim": 16}},
    ),
    NativeRow(
        name="wan-scail",
        model="WAN21_SCAIL",
        tier="B",
        unet=WAN | {"in_dim": 20},
        latent=FRAMES,
        text=TEXT,
        conditioning=_pose,
    ),
    NativeRow(
        name="wan-dancer",
        model="WAN22_WanDancer",
        tier="B",
        unet=WAN | {"in_dim": 36, "audio_inject_layers": [0], "music_dim": 32, "music_latent_dim": 32},
        latent=FRAMES,
        text=TEXT,
        conditioning=_music,
    ),
)

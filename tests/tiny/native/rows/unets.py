"""U-Nets of Stable Diffusion and its relatives."""

from typing import Any

from ..row import Draw, NativeRow

TEXT = (7, 48)
UNET: dict[str, Any] = {
    "use_checkpoint": False,
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "use_spatial_transformer": True,
    "legacy": False,
    "model_channels": 32,
    "channel_mult": [1, 2],
    "num_res_blocks": [1, 1],
    "transformer_depth": [0, 2],
    "transformer_depth_middle": 1,
    "transformer_depth_output": [0, 0, 2, 2],
    "context_dim": TEXT[1],
    "num_heads": -1,
    "num_head_channels": 16,
    "use_temporal_attention": False,
    "use_temporal_resblock": False,
}
HEADS = {"num_heads": 2, "num_head_channels": -1}


def _pooled(draw: Draw) -> dict[str, Any]:
    return {"pooled_output": draw(1, 24), "width": 96, "height": 64}


NAMED = (
    NativeRow(
        name="sdxl",
        model="SDXL",
        tier="A",
        unet=UNET | {"use_linear_in_transformer": True, "num_classes": "sequential", "adm_in_channels": 24 + 6 * 256},
        latent=(4, 8, 12),
        text=TEXT,
        conditioning=_pooled,
    ),
    NativeRow(
        name="sd1.5",
        model="SD15",
        tier="A",
        unet=UNET | HEADS | {"use_linear_in_transformer": False, "adm_in_channels": None},
        latent=(4, 8, 12),
        text=TEXT,
    ),
)
FURTHER = (
    NativeRow(
        name="sd2",
        model="SD20",
        tier="B",
        unet=UNET | {"use_linear_in_transformer": True, "adm_in_channels": None},
        latent=(4, 8, 12),
        text=TEXT,
    ),
)

"""Tiny VAEs of HunyuanVideo 1.5, LTX-Video and MiniMax H3, of core's own classes with random weights."""

from functools import partial
from typing import Any

import torch

from ..models.weights import fill
from .image_encoders import make_vae, replaced

# LTX's VAE reads its sizes from its file's metadata.
LTX_BLOCKS = [["res_x", 1], ["compress_all", 1], ["res_x_y", 1], ["compress_all", 1], ["compress_all", 1], ["res_x", 1]]
LTX_CONFIG = {
    "dims": 3,
    "latent_channels": 128,
    "blocks": LTX_BLOCKS,
    "norm_layer": "pixel_norm",
    "patch_size": 4,
    "latent_log_var": "uniform",
    "causal_decoder": False,
    "encoder_base_channels": 8,
    "decoder_base_channels": 8,
}


def ltx_vae_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of LTX-Video's VAE in `LTX_CONFIG`'s sizes: 128 channels, 32 x 32 pixels and eight frames a cell."""
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    shapes = VideoVAE(config=LTX_CONFIG).state_dict()
    tensors = fill({name: tuple(tensor.shape) for name, tensor in shapes.items()}, seed)
    tensors["per_channel_statistics.mean-of-means"].sub_(1)
    return tensors


def load_hunyuan_video_15_vae() -> Any:
    """HunyuanVideo 1.5's VAE: 32 channels, 16 x 16 pixels and four frames a cell."""
    import comfy.sd

    real = comfy.sd.AutoencodingEngine

    def tiny(*, encoder_config: Any, decoder_config: Any, **kwargs: Any) -> Any:
        for part in (encoder_config, decoder_config):
            part["params"] |= {"block_out_channels": [8, 8, 16, 64, 64], "num_res_blocks": 1}
        return real(encoder_config=encoder_config, decoder_config=decoder_config, **kwargs)

    module = "comfy.ldm.hunyuan_video.vae_refiner"
    sizes = {"in_channels": 3, "out_channels": 3, "z_channels": 32, "ffactor_spatial": 16, "ffactor_temporal": 4}
    model = tiny(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.EmptyRegularizer"},
        encoder_config={"target": f"{module}.Encoder", "params": dict(sizes)},
        decoder_config={"target": f"{module}.Decoder", "params": dict(sizes)},
    )
    with replaced(comfy.sd, "AutoencodingEngine", tiny):
        return make_vae(model)


def load_minimax_h3_vae() -> Any:
    """MiniMax H3's VAE of the video: 24 channels, 16 x 16 pixels, and five latent frames for 17 frames."""
    import comfy.ldm.minimax.vae as minimax

    decoder = partial(minimax.ViT3DDecoder, num_layers=1, heads=1)
    tiny = partial(minimax.MiniMaxH3VideoVAE, ch=32, ch_mult=(1,) * 6, num_res_blocks=1)
    with replaced(minimax, "ViT3DDecoder", decoder), replaced(minimax, "MiniMaxH3VideoVAE", tiny):
        return make_vae(tiny())

"""Files of a tiny LTX-2.3 as ComfyUI's loaders read them: a checkpoint with both VAEs, and Gemma 3."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..data.image_encoders import replaced
from ..data.spiece import CHARACTERS, GEMMA, spiece_model
from ..data.video_vaes import LTX_CONFIG, ltx_vae_tensors
from ..native.row import NativeRow, build
from .weights import fill

DISTILLED = "ltx_2.3_22b_distilled_1.1_lora_dynamic_fro09_avg_rank_111_bf16.safetensors"
CHECKPOINT, ENCODER = "tiny_ltx_2_3.safetensors", "tiny_gemma_3.safetensors"
WIDTH, LAYERS = 32, 48  # the loader knows Gemma by the last of its layers
EYES = {"num_channels": 3, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 32, "image_size": 896}
EYES |= {"intermediate_size": 32, "model_type": "siglip_vision_model", "num_attention_heads": 1}
EYES |= {"num_hidden_layers": 1, "patch_size": 14}
VOICE = {"upsample_initial_channel": 32, "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]]}
BWE = {"upsample_rates": [4, 4, 4, 3], "upsample_kernel_sizes": [8, 8, 8, 3], "num_mels": 64, "n_fft": 128}
BWE |= {"hop_length": 64, "input_sampling_rate": 16000, "output_sampling_rate": 48000}
SOUND = {
    "audio_vae": {
        "model": {
            "params": {
                "ddconfig": {
                    "double_z": True,
                    "mel_bins": 64,
                    "z_channels": 8,
                    "resolution": 256,
                    "downsample_time": False,
                    "in_channels": 2,
                    "out_ch": 2,
                    "ch": 8,
                    "ch_mult": [1, 1, 1],
                    "num_res_blocks": 1,
                    "attn_resolutions": [],
                    "dropout": 0.0,
                    "mid_block_add_attention": False,
                    "norm_type": "pixel",
                    "causality_axis": "height",
                },
                "sampling_rate": 16000,
            }
        },
        "preprocessing": {"stft": {"filter_length": 1024, "hop_length": 160}},
    },
    "vocoder": {"vocoder": VOICE, "bwe": VOICE | BWE},
}


def load_ltx_2_3(row: NativeRow, folder: Path) -> tuple[Any, Any, Any, Any]:
    """MODEL, CLIP, VAE and the VAE of the sound, loaded from files in the folder as core's loader nodes load them."""
    import comfy.sd
    import comfy.utils

    checkpoint, encoder = write_checkpoint(row, folder / CHECKPOINT), folder / ENCODER
    model, _, vae, *_ = comfy.sd.load_checkpoint_guess_config(str(checkpoint), output_clip=False)
    with _small(row):
        if not encoder.exists():
            _write_encoder(encoder)
        clip = comfy.sd.load_clip([str(encoder), str(checkpoint)], clip_type=comfy.sd.CLIPType.LTXV)
    # As LTXVAudioVAELoader does, which takes a name in ComfyUI's folders.
    tensors, metadata = comfy.utils.load_torch_file(str(checkpoint), return_metadata=True)
    names = {"audio_vae.": "autoencoder.", "vocoder.": "vocoder."}
    sound = comfy.sd.VAE(comfy.utils.state_dict_prefix_replace(tensors, names, filter_keys=True), metadata=metadata)
    sound.throw_exception_if_invalid()
    return model, clip, vae, sound


def write_checkpoint(row: NativeRow, path: Path) -> Path:
    """Write the transformer, both VAEs and the projection of the text, with the sizes of all in the metadata."""
    from comfy.ldm.lightricks.vae.audio_vae import AudioVAE

    metadata = {"config": json.dumps({"transformer": dict(row.unet), "vae": LTX_CONFIG, **SOUND})}
    weights = build(row).model.diffusion_model.state_dict()
    tensors = {f"model.diffusion_model.{name}": tensor.clone() for name, tensor in weights.items()}
    tensors |= {f"vae.{name}": tensor for name, tensor in ltx_vae_tensors().items()}
    sound = AudioVAE(metadata=metadata).state_dict()
    for name, tensor in fill({name: tuple(tensor.shape) for name, tensor in sound.items()}, 0).items():
        tensors[name.replace("autoencoder.", "audio_vae.")] = tensor
    shapes = {}
    for part, width in zip(("video", "audio"), _text_widths(row), strict=True):
        name = f"text_embedding_projection.{part}_aggregate_embed"
        shapes |= {f"{name}.weight": (width, WIDTH * (LAYERS + 1)), f"{name}.bias": (width,)}
    save_file(tensors | fill(shapes, 0), path, metadata)
    return path


def write_distilled(folder: Path) -> None:
    """Write a LoRA of one layer under the name of the distilled one that the workflow samples with."""
    folder.mkdir(parents=True, exist_ok=True)
    layer = "diffusion_model.transformer_blocks.0.attn1.to_q"
    pair = {"A": torch.ones(2, 64) / 8, "B": torch.ones(64, 2) / 8}
    save_file({f"{layer}.lora_{part}.weight": tensor for part, tensor in pair.items()}, folder / DISTILLED)


def _text_widths(row: NativeRow) -> tuple[int, int]:
    return row.unet["cross_attention_dim"], row.unet["audio_cross_attention_dim"]


def _write_encoder(path: Path) -> None:
    import comfy.ops
    import comfy.text_encoders.llama as llama

    encoder = llama.Gemma3_12B({}, torch.float32, "cpu", comfy.ops.disable_weight_init)
    tensors = fill({name: tuple(tensor.shape) for name, tensor in encoder.state_dict().items()}, 0)
    tensors["spiece_model"] = torch.tensor(list(spiece_model(GEMMA)), dtype=torch.uint8)
    save_file(tensors, path)


def _small(row: NativeRow) -> ExitStack:
    """Context in which ComfyUI makes Gemma 3 and the projection behind it in tiny sizes, which it fixes in its code."""
    import comfy.text_encoders.llama as llama
    import comfy.text_encoders.lt as lt

    @dataclass
    class Small(llama.Gemma3_12B_Config):
        vocab_size: int = len(GEMMA) + len(CHARACTERS)
        hidden_size: int = WIDTH
        intermediate_size: int = 64
        num_hidden_layers: int = LAYERS
        num_attention_heads: int = 1
        num_key_value_heads: int = 1
        head_dim = 32
        vision_config = EYES

    real: Callable[..., Any] = lt.DualLinearProjection
    projection = lambda *_, **kwargs: real(WIDTH * (LAYERS + 1), *_text_widths(row), **kwargs)  # noqa: E731
    stack = ExitStack()
    stack.enter_context(replaced(llama, "Gemma3_12B_Config", Small))
    stack.enter_context(replaced(lt, "DualLinearProjection", projection))
    return stack

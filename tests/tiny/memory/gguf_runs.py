"""LoRAs on a tiny FLUX.1 of a GGUF file, and its forward by its loader and by training."""

from typing import Any

import torch
from torch import Tensor

from ..data.encoders import CLIP_WIDTH, T5_WIDTH
from .gguf import values_of

HEIGHT = 4
WIDTH = 6
TEXT = 10


def memory_of(model: Any) -> dict[str, Tensor]:
    """Return a copy of the bytes of each weight."""
    weights = model.model.diffusion_model.named_parameters()
    return {name: weight.as_subclass(torch.Tensor).detach().clone() for name, weight in weights}


def copy_values(model: Any, target: Any) -> None:
    """Copy the dequantised values of a MODEL to a MODEL of fp32 weights."""
    with torch.inference_mode():
        for key, weight in model.model.diffusion_model.named_parameters():
            values = values_of(weight) if hasattr(weight, "tensor_type") else weight
            target.model.diffusion_model.get_parameter(key).copy_(values)


def plain_lora(rank: int = 2) -> dict[str, Tensor]:
    """kohya's keys on two Linears; diffusers' on a part of one."""
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=generator)

    shapes = {"double_blocks_0_img_mlp_0": (512, 128), "single_blocks_1_linear2": (128, 640)}
    tensors = {}
    for name, (rows, columns) in shapes.items():
        tensors[f"lora_unet_{name}.lora_up.weight"] = normal(rows, rank)
        tensors[f"lora_unet_{name}.lora_down.weight"] = normal(rank, columns)
        tensors[f"lora_unet_{name}.alpha"] = torch.tensor(1.0)
    part = "transformer.transformer_blocks.1.attn.to_k"
    tensors[f"{part}.lora_B.weight"], tensors[f"{part}.lora_A.weight"] = normal(128, rank), normal(rank, 128)
    return tensors


def loha() -> dict[str, Tensor]:
    """kohya's keys on one Linear."""
    generator = torch.Generator().manual_seed(4)
    name, tensors = "lora_unet_double_blocks_0_img_mlp_0", {}
    for half in ("hada_w1", "hada_w2"):
        tensors[f"{name}.{half}_a"] = torch.randn(512, 2, generator=generator)
        tensors[f"{name}.{half}_b"] = 0.2 * torch.randn(2, 128, generator=generator)
    return tensors | {f"{name}.alpha": torch.tensor(2.0)}


def with_lora(model: Any, lora: dict[str, Tensor] | None) -> Any:
    """The MODEL behind core's Load LoRA."""
    import comfy.sd

    if lora is None:
        return model
    with torch.inference_mode():
        patched, _ = comfy.sd.load_lora_for_models(model, None, lora, 0.8, 0)
    return patched


def both_forwards(model: Any) -> tuple[Tensor, Tensor, Any]:
    """The velocity of the loader's own forward, and ours, as tokens; the transformer."""
    import comfy.model_management
    from tessera.memory.weights.frozen import unload
    from tessera.models.flux.family import Flux
    from tessera.models.flux.transformer import FluxInputs
    from tessera.models.model_patches import trainable_model

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 16, 2 * HEIGHT, 2 * WIDTH, generator=generator)
    text = torch.randn(2, TEXT, T5_WIDTH, generator=generator)
    pooled = torch.randn(2, CLIP_WIDTH, generator=generator)
    sigma, guidance = torch.tensor([0.3, 0.8]), torch.tensor([3.5, 1.0])
    with torch.inference_mode():
        comfy.model_management.load_models_gpu([model])
        denoised = model.model.apply_model(x, sigma, c_crossattn=text, y=pooled, guidance=guidance)
    reference = ((x - denoised) / sigma.view(-1, 1, 1, 1)).clone()
    patcher, _ = trainable_model(model)
    unload()
    family = Flux()
    transformer = family.forward.build(patcher, patcher.load_device, torch.float32, "auto")
    cut = [family.forward.patchify(latent, HEIGHT * WIDTH) for latent in x]
    inputs = FluxInputs(
        tokens=torch.stack([c.tokens for c in cut]),
        positions=torch.stack([c.positions for c in cut]),
        text=text,
        pooled=pooled,
        timestep=sigma,
        guidance=guidance,
    )
    with torch.no_grad():
        our_output = transformer.forward(lambda block, *rest: block(*rest, {}), inputs)
    return (
        torch.stack([family.forward.patchify(latent, HEIGHT * WIDTH).tokens for latent in reference]),
        our_output,
        transformer,
    )

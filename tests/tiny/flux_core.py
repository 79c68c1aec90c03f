"""What ComfyUI's own FLUX.1 and FLUX.2 make of a sample."""

from typing import Any

import torch
from torch import Tensor


def core_velocity(model: Any, sample: Any, sigma: float, guidance: float = 1.0) -> Tensor:
    """(N, C·patch) from `apply_model` on this sample alone; a ragged edge by leaving its tokens out of core's sequence,
    between core's cutting into tokens and its blocks."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([model])
    core, read, patch = model.model.diffusion_model, sample.load(), model.model.diffusion_model.patch_size
    x = read.latent[None].to(model.load_device)
    given = {**read.conditioning, "guidance": guidance}
    conds = model.model.extra_conds(cross_attn=read.text, noise=x, device=x.device, **given)
    args = {name: cond.process_cond(1, area=None, device=x.device).cond for name, cond in conds.items()}
    own, keep = x.shape[-2] * x.shape[-1] // patch**2, sample.tokens
    whole = core.forward_orig

    def on_kept_tokens(img: Tensor, img_ids: Tensor, *rest: Any, **options: Any) -> Tensor:
        there = torch.cat((torch.arange(keep), torch.arange(own, img.shape[1])))
        if options.get("timestep_zero_index") is not None:
            assert options["timestep_zero_index"] == [[own, img.shape[1]]]
            options["timestep_zero_index"] = [[keep, len(there)]]
        kept = whole(img[:, there], img_ids[:, there], *rest, **options)
        out = kept.new_zeros(1, img.shape[1], kept.shape[-1])
        out[:, there] = kept
        return out

    core.forward_orig = on_kept_tokens
    try:
        with torch.no_grad():
            level = torch.tensor([sigma], device=x.device)
            denoised = model.model.apply_model(x, level, **args)
    finally:
        del core.forward_orig
    return to_tokens(((x.double() - denoised.double()) / sigma)[0].float().cpu(), patch)[:keep]


def to_tokens(latent: Tensor, patch: int) -> Tensor:
    """(C, H, W) → (tokens, C·patch²), ordered as (channel, row, column) inside a token."""
    cells = latent.unfold(1, patch, patch).unfold(2, patch, patch)  # (C, h, w, patch, patch)
    return cells.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)


def our_velocity(model: Any, samples: list[Any], sigmas: list[float], guidance: float = 1.0) -> Tensor:
    """(B, N, C·patch) of the samples as one batch."""
    from tessera.memory.weights.frozen import unload
    from tessera.models.family import NoisySample
    from tessera.models.registry import family_of

    unload()
    family, device, dtype = family_of(model), model.load_device, model.model.get_dtype_inference()
    transformer = family.build(model, device, dtype, "auto")
    reads = [sample.load() for sample in samples]
    noisy = [
        NoisySample(r.latent, r.text, r.conditioning, s.tokens, s.text_length)
        for s, r in zip(samples, reads, strict=True)
    ]
    with torch.no_grad():
        inputs = family.inputs(model, noisy, torch.tensor(sigmas, device=device), guidance)
        return transformer.forward(lambda block, *rest: block(*rest, {}), inputs).float().cpu()

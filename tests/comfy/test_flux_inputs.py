"""Each sample of a batch goes in with its own conditioning, as core would give it alone."""

import tiny
import torch
from tessera.memory.weights.frozen import unload
from tessera.models.family import NoisySample
from tessera.models.flux.family import Flux

TOKENS, TEXT = 24, 10


def noisy(height, width, pooled):
    generator = torch.Generator().manual_seed(height)
    latent = torch.randn(16, 2 * height, 2 * width, generator=generator)
    text = torch.randn(1, TEXT, tiny.T5_WIDTH, generator=generator)
    conditioning = {"pooled_output": torch.randn(1, tiny.CLIP_WIDTH, generator=generator)} if pooled else {}
    return NoisySample(latent, text, conditioning, TOKENS, TEXT)


def core_velocity(model, sample, sigma, guidance):
    """From core's apply_model on this sample alone, cut into tokens."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([model])
    level = torch.tensor([sigma])
    args = {"c_crossattn": sample.text, "guidance": torch.tensor([guidance])}
    if "pooled_output" in sample.conditioning:
        args["y"] = sample.conditioning["pooled_output"]
    denoised = model.model.apply_model(sample.latent[None], level, **args)[0]
    return Flux().cut((sample.latent - denoised) / sigma, TOKENS).tokens


@torch.no_grad()
def test_a_batch_of_samples_with_and_without_pooled_text_equals_core_on_each_alone(tiny_flux):
    samples, sigmas = [noisy(4, 6, True), noisy(6, 4, False), noisy(3, 8, True)], [0.2, 0.5, 0.9]
    expected = [core_velocity(tiny_flux, s, sigma, 2.5) for s, sigma in zip(samples, sigmas, strict=True)]
    unload()
    family = Flux()
    transformer = family.build(tiny_flux, tiny_flux.load_device, torch.float32, "auto")
    inputs = family.inputs(tiny_flux, samples, torch.tensor(sigmas), 2.5)
    assert inputs.timestep.dtype == torch.float32
    result = transformer.forward(lambda block, *rest: block(*rest, {}), inputs)
    assert torch.allclose(result, torch.stack(expected), atol=2e-5, rtol=1e-4)

"""Tests of whether a LoRA has learned, by ComfyUI's own forward and sampler with its own loader of LoRAs."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

SIGMAS = (0.1, 0.3, 0.5, 0.7, 0.9)

# A random base has to be changed whole to learn a sample, so every Linear is trained.
WHOLE = {"rank": 64, "alpha": 64.0, "include": ("*",)}


def with_lora(model: Any, result: Any) -> Any:
    import comfy.sd

    return comfy.sd.load_lora_for_models(model, None, dict(result.lora), 1.0, 0)[0]


def assert_loss_falls(loss: Callable[[Any, float], float], model: Any, learned: Any) -> None:
    """loss(model, sigma) falls to less than a fifth at each of SIGMAS."""
    base_losses, lora_losses = ([loss(m, sigma) for sigma in SIGMAS] for m in (model, learned))
    assert all(a < b / 5 for a, b in zip(lora_losses, base_losses, strict=True)), (base_losses, lora_losses)


def assert_draws(draw: Callable[[Any], Tensor], expected: Tensor, models: tuple[Any, Any], near: float, far: float):
    """Check that draw(model) is within `near` of `expected`, in parts of its norm, with the LoRA, and `far` from it
    without.
    models: (without, with)."""
    untrained, learned = ((draw(model) - expected).norm() / expected.norm() for model in models)
    assert learned < near and untrained > far, (untrained, learned)


def sampled(model: Any, start: Tensor, text: Tensor, conditioning: dict[str, Any], **options: Any) -> Tensor:
    """Latent that core's sampler makes of noise over `start` (of one sample) in eight Euler steps, with guidance 1."""
    import comfy.sample

    noise = comfy.sample.prepare_noise(start[None], 1)
    positive = [[text, {**conditioning, "guidance": 1.0}]]
    return comfy.sample.sample(
        *(model, noise, 8, 1.0, "euler", "simple", positive, positive, start[None]), disable_pbar=True, **options
    )[0]

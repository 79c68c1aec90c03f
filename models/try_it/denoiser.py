"""Turn a random tiny FLUX into one that removes noise, but knows nothing about pictures.

Its velocity is optimal for data of independent normal values of variance `s2`, c(sigma) * x with c = (sigma - (1 -
sigma) * s2) / (sigma^2 + (1 - sigma)^2 * s2) (the regression of noise - x0 on x). So its samples are nearly flat, and a
LoRA has to learn only the pictures, as with a trained model.
"""

import math

import torch
from torch import Tensor

CARRIER = 3.0  # the magnitude of the constant half of each token, which keeps the last layer norm nearly linear in x


def _time_features(weights: dict[str, Tensor], sigma: Tensor) -> Tensor:
    """Compute silu of FLUX's time embedding, (number of sigmas, hidden size), without guidance and with zero pooled
    text."""
    angles = 1000 * sigma[:, None] * torch.exp(-math.log(10000) * torch.arange(128) / 128)
    features = torch.cat([angles.cos(), angles.sin()], dim=1)
    for layer in ("in_layer", "out_layer"):
        features = features @ weights[f"time_in.{layer}.weight"].T + weights[f"time_in.{layer}.bias"]
        features = torch.nn.functional.silu(features)
    return features


def make_denoiser(weights: dict[str, Tensor], data_variance: float = 0.05) -> None:
    """Set the outer layers of a small FLUX (fp32 tensors, in place) and scale down the output of its blocks.

    data_variance: `s2` above. Raises ValueError if the hidden size is less than twice a token's input.
    """
    hidden_size, patch = weights["img_in.weight"].shape
    if hidden_size < 2 * patch:
        raise ValueError(
            f"hidden is {hidden_size}; a tiny denoiser needs at least {2 * patch}, to carry its input through."
        )
    for name, tensor in weights.items():
        if name.endswith(("_attn.proj.weight", "_mlp.2.weight", "linear2.weight")):
            tensor *= 0.05
        elif name.endswith((".proj.bias", "_mlp.2.bias", "linear2.bias")):
            tensor *= 0.05
        elif name.endswith(("_mod.lin.weight", "modulation.lin.weight")):
            tensor *= 0.3
        elif name.endswith(("_mod.lin.bias", "modulation.lin.bias")):
            tensor.view(-1, 3, hidden_size)[:, 2] += 1  # shift, scale, gate: open the gates
        elif name.startswith(("vector_in.out_layer", "guidance_in.out_layer")):
            tensor *= 0.05
    identity = torch.eye(hidden_size, patch)
    carrier = torch.cat([torch.zeros(patch), CARRIER * torch.ones(hidden_size - patch)])
    carrier[patch + 1 :: 2] *= -1
    weights["img_in.weight"].mul_(0.02).add_(identity)
    weights["img_in.bias"].mul_(0.02).add_(carrier)
    weights["final_layer.linear.weight"].mul_(0.02).add_(identity.T)

    sigma = torch.linspace(0.01, 1, 200)
    variance = sigma**2 + (1 - sigma) ** 2 * data_variance
    target = (sigma - (1 - sigma) * data_variance) / variance
    norm = ((patch * variance + (hidden_size - patch) * CARRIER**2) / hidden_size).sqrt()
    features = torch.cat([_time_features(weights, sigma), torch.ones(len(sigma), 1)], dim=1)
    ridge = 1e-3 * torch.eye(features.shape[1])
    row = torch.linalg.solve(features.T @ features + ridge, features.T @ (target * norm - 1))
    modulation = "final_layer.adaLN_modulation.1"
    weights[f"{modulation}.weight"].mul_(0.02)[hidden_size:] += row[:-1]
    weights[f"{modulation}.bias"].mul_(0.02)[hidden_size:] += row[-1]

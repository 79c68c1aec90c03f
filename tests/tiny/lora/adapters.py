"""Each adapter's weight written out in fp64, as its paper or its reader has it: the references of the tests."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# Settings of each algorithm that are not the plain ones.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "lora": {"algorithm": "lora", "rank": 4, "alpha": 8.0},
    "loha": {"algorithm": "loha", "rank": 3, "alpha": 2.0},
    "lokr": {"algorithm": "lokr", "rank": 4, "alpha": 6.0, "factor": 4},
    "lokr whole": {"algorithm": "lokr", "rank": 64, "alpha": 6.0},
    "dora": {"algorithm": "dora", "rank": 4, "alpha": 8.0},
    "oft": {"algorithm": "oft", "rank": 8},
    "oft constrained": {"algorithm": "oft", "rank": 8, "constraint": 0.002},
    "pissa": {"algorithm": "lora", "rank": 4, "alpha": 8.0, "init": "pissa"},
}


def adapted_weight(options: Any, weight: Tensor, masters: Mapping[str, Tensor]) -> Tensor:
    """W' (out, in) of W, by the numbers of one layer, each in fp64."""
    m, scale = masters, options.alpha / options.rank
    if options.init == "pissa":
        up, down = m["up_start"] + m["up"], m["down_start"] + m["down"]
        return weight - scale * m["up_start"] @ m["down_start"] + scale * up @ down
    if options.algorithm == "lora":
        return weight + scale * m["up"] @ m["down"]
    if options.algorithm == "loha":
        return weight + scale * (m["hada_w1_a"] @ m["hada_w1_b"]) * (m["hada_w2_a"] @ m["hada_w2_b"])
    if options.algorithm == "lokr":
        w2 = m["lokr_w2"] if "lokr_w2" in m else scale * m["lokr_w2_a"] @ m["lokr_w2_b"]
        return weight + torch.kron(m["lokr_w1"], w2)
    if options.algorithm == "dora":
        direction = weight + scale * m["up"] @ m["down"]
        return (weight.norm(dim=0) + m["magnitude"]) * direction / direction.norm(dim=0).detach()
    q = m["oft_blocks"] - m["oft_blocks"].transpose(1, 2)
    limit = options.constraint * len(weight)
    if limit and q.norm() > limit:
        q = q * limit / q.norm()
    eye = torch.eye(q.shape[-1], dtype=q.dtype)
    turns = (eye + q) @ torch.linalg.inv(eye - q)
    return torch.block_diag(*turns).T @ weight


def numbers(adapter: torch.nn.Module) -> dict[str, Tensor]:
    """Return the tensors of an adapter in fp64: leaves for its parameters, and its buffers."""
    tensors = {name: b.double() for name, b in adapter.named_buffers()}
    return tensors | {name: p.detach().double().requires_grad_() for name, p in adapter.named_parameters()}


def fill(adapter: torch.nn.Module, seed: int, size: float = 0.05) -> None:
    """Move every master away from its start, at which some have no gradient."""
    with torch.no_grad():
        for index, p in enumerate(adapter.parameters()):
            p.add_(size * torch.randn(p.shape, generator=torch.Generator().manual_seed(97 * seed + index)))


def fp64_model(trainer: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """Return a stand-in for the trainer without adapters, the model's fp64 weights with the adapters in them, and the
    masters that their gradient reaches, by their names in a state."""
    from dataclasses import replace

    merged, leaves = {name: tensor.double() for name, tensor in tensors.items()}, {}
    options = trainer.settings.network
    for name, adapter in trainer.network.adapters.items():
        tensors_of_layer = numbers(adapter)
        spec = replace(options, rank=adapter.spec.rank, alpha=adapter.spec.alpha)
        merged[f"{name}.weight"] = adapted_weight(spec, merged[f"{name}.weight"], tensors_of_layer)
        leaves |= {f"{name}.{n}": p for n, p in tensors_of_layer.items() if p.requires_grad}
    bare = SimpleNamespace(settings=trainer.settings, context=trainer.context, network=SimpleNamespace(pairs={}))
    return bare, merged, leaves


def gradients(trainer: Any) -> dict[str, Tensor]:
    """The masters' gradients by their names in a state."""
    named_parameters = zip(trainer.network.master_weights(), trainer.network.parameters(), strict=True)
    return {name: torch.zeros_like(p).double() if p.grad is None else p.grad.double() for name, p in named_parameters}

"""LoRA updates with random numbers, and what ComfyUI makes of a file of them."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

RANK = 4


def random_update(rows: int, columns: int, index: int) -> Any:
    """An update with an alpha of its own."""
    from tessera.lora.files.lora_model import LowRank

    generator = torch.Generator().manual_seed(index)
    down = torch.randn(RANK, columns, generator=generator) * columns**-0.5
    return LowRank(down, 0.3 * torch.randn(rows, RANK, generator=generator), 1.3 + 0.1 * index)


def random_updates(model: Any) -> dict[str, Any]:
    """A random update for every Linear of a MODEL, by the module's own name."""
    linears = {n: m for n, m in model.model.diffusion_model.named_modules() if isinstance(m, nn.Linear)}
    return {name: random_update(*linear.weight.shape, i) for i, (name, linear) in enumerate(linears.items())}


def delta(part: Any) -> Tensor:
    """alpha / rank · up @ down, in fp64."""
    return part.alpha / RANK * (part.up.double() @ part.down.double())


def loaded_in_comfyui(model: Any, tensors: Mapping[str, Tensor], caplog: Any) -> Any:
    """The MODEL with the LoRA on it; any warning of the loader is a failure."""
    import comfy.sd

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        patched, _ = comfy.sd.load_lora_for_models(model, None, tensors, 1.0, 0.0)
    assert [record.getMessage() for record in caplog.records] == []
    return patched


def patched_deltas(model: Any, patched: Any) -> dict[str, Tensor]:
    """Change that the patches add to each patched weight, by the module's own name."""
    import comfy.utils

    result = {}
    for key in patched.patches:
        difference = patched.patch_weight_to_device(key, return_weight=True) - comfy.utils.get_attr(model.model, key)
        result[key.removeprefix("diffusion_model.").removesuffix(".weight")] = difference.double()
    return result


def assert_same_deltas(deltas: Mapping[str, Tensor], modules: Mapping[str, Any], relative: float) -> None:
    assert deltas.keys() == modules.keys()
    for name, part in modules.items():
        expected = delta(part)
        assert (deltas[name] - expected).norm() <= relative * expected.norm(), name

"""Nothing that sampling leaves on a MODEL comes into its training: each tiny model is copied before and after."""

from typing import Any

import pytest
import torch
from tessera.memory.weights.frozen import FrozenWeights
from tessera.models.native.comfyui.leftovers import OF_TORCH, Leftovers, as_loaded, fresh_attributes
from tessera.models.native.forward.shadow import Shadow
from tiny.native import TRAINED, build, core_forward, data_of
from torch import Tensor

CPU = torch.device("cpu")


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {key: described(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [described(inner) for inner in value]
    plain = isinstance(value, bool | int | float | str) or value is None
    return value if plain else type(value).__name__


def attributes(model: Any) -> dict[str, dict[str, Any]]:
    """Those of a model and of its modules, but for torch's own."""
    tables = {name: vars(module) for name, module in model.named_modules()}
    return {
        name: {key: described(value) for key, value in table.items() if key not in OF_TORCH}
        for name, table in tables.items()
        if "model_sampling" not in name
    }


def shadow_of(patcher: Any) -> dict[str, dict[str, Any]]:
    return attributes(Shadow(patcher, FrozenWeights(patcher, CPU, torch.float32)).base)


@pytest.mark.parametrize("row", TRAINED, ids=str)
def test_sampling_leaves_nothing_in_the_copy_that_trains(row):
    patcher, sample = build(row), data_of(row, 1).samples[0]
    shadow, outside = shadow_of(patcher), attributes(as_loaded(patcher.model))
    assert fresh_attributes(patcher.model) is not None
    leftovers, modules = Leftovers(patcher.model), patcher.model.diffusion_model.named_modules()
    assert not leftovers.in_model() and not any(leftovers.in_module(name, module) for name, module in modules)
    with torch.inference_mode():
        patcher.pre_run()
        core_forward(patcher, row, sample, 0.5)
        # As core's guider leaves them since 0.31.
        patcher.model.latent_shapes = [torch.Size((1, *row.latent)), torch.Size((1, 3))]
        patcher.cleanup()
    assert shadow_of(patcher) == shadow
    assert attributes(as_loaded(patcher.model)) == outside

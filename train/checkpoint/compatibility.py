"""Compatibility of a saved state with the run's options, checked from its header before a model is loaded."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher

from ...common.text import quantity
from ...lora.network import OTHER_NETWORK, RESUME_OFF
from ...lora.options import NetworkOptions
from ...lora.plan import adapter_specs
from ...models.adapters.base import Adapter, AdapterSpec
from ...models.adapters.registry import adapter_kind
from ...models.convolutions import layer_shapes
from ..config.settings import TrainSettings
from ..optim.optimizers import check_class, chosen_class
from ..optim.param_groups import check_groups, flat, group_sizes, parameter_groups
from .optimizer_fit import fits_optimizer
from .state import damaged_field, read_header

Shapes = Mapping[str, tuple[int, ...]]
_MADE_WITH = ("algorithm", "init", "rank", "factor")


def check_state(path: Path, settings: TrainSettings, patcher: ModelPatcher, targets: Sequence[str]) -> None:
    """Check that a run with these settings on the layers `targets` of `patcher`'s model can resume from the state.

    Raises ValueError, naming the input, if it cannot, or if the saved weights would silently mean something else under
    these settings (another alpha, for example).
    """
    header = read_header(path)
    network = settings.network
    optimizer = settings.optimizer
    shapes = layer_shapes(patcher.model)
    adapters = {name: _bare(spec, shapes[name]) for name, spec in adapter_specs(network, targets).items()}
    saved = {
        name: AdapterSpec(**{field: value for field, value in group.items() if field != "layers"})
        for group in header.adapters
        for name in group["layers"]
    }
    _check_network({name: tensor.shape for name, tensor in header.master_weights.items()}, saved, adapters, network)
    check_class(header.moving["optimizer"]["class"], chosen_class(optimizer))
    master_weights = {f"{n}.{name}": p for n, adapter in adapters.items() for name, p in adapter.named_parameters()}
    groups = parameter_groups(master_weights, optimizer.learning_rate, network.lora_plus_ratio)
    saved_groups = header.moving["optimizer"]["param_groups"]
    check_groups(group_sizes(groups), [len(group["params"]) for group in saved_groups])
    average = header.moving["average"]
    if average and average["masters"].keys() != master_weights.keys():
        raise damaged_field(path, "average")
    if not fits_optimizer(optimizer, flat(groups), header.moving["optimizer"], header.step, patcher.load_device):
        raise ValueError(
            f"resume: {path.name} does not fit {optimizer.display_name} with the settings here; set the optimizer as "
            f"it was, choose another state, {RESUME_OFF}"
        )


def _bare(spec: AdapterSpec, size: tuple[int, int]) -> Adapter:
    """Build an adapter on the meta device, for its shapes only. size: (out, in) of the layer."""
    with torch.device("meta"):
        return adapter_kind(spec)(spec, *size)


def _check_network(
    saved_shapes: Shapes,
    saved_specs: Mapping[str, AdapterSpec],
    adapters: Mapping[str, Adapter],
    network: NetworkOptions,
) -> None:
    """Compare the adapters of a state with those of this run.

    saved_shapes: shapes of the state's fp32 weights by name.
    saved_specs: adapter specs of the state by layer.
    adapters: adapters of this run by layer.

    Raises ValueError at the first difference.
    """
    layers = dict.fromkeys(name.rpartition(".")[0] for name in saved_shapes)
    if layers.keys() != adapters.keys():
        raise ValueError(
            f"resume: that state trained {quantity(len(layers), 'layer')} and the network here trains "
            f"{len(adapters)} ({'; '.join(_describe_difference(layers, adapters))}); set targets and the model as they "
            f"were, {RESUME_OFF}"
        )
    for name, adapter in adapters.items():
        shapes = {f"{name}.{key}": tuple(t.shape) for key, t in adapter.state_dict().items()}
        shapes_match = shapes == {key: shape for key, shape in saved_shapes.items() if key.rpartition(".")[0] == name}
        saved_spec, spec = saved_specs[name], adapter.spec
        if not shapes_match:
            field = next(
                (option for option in _MADE_WITH if getattr(saved_spec, option) != getattr(spec, option)), None
            )
            raise _other(field, name, saved_spec, spec, network) if field else ValueError(OTHER_NETWORK)
        if _bare(saved_spec, (adapter.out_features, adapter.in_features)).strength != adapter.strength:
            raise _other(adapter.strength_field, name, saved_spec, spec, network)


def _other(field: str, layer: str, saved_spec: AdapterSpec, spec: AdapterSpec, network: NetworkOptions) -> ValueError:
    saved_value, value = getattr(saved_spec, field), getattr(spec, field)
    by_pattern = value != getattr(network, field)
    fix = "set rank_patterns as they were" if by_pattern else f"set {field} to {_format_value(saved_value)}"
    scaled = ", which would change the strength of everything it learnt" if field in ("alpha", "constraint") else ""
    if spec.algorithm == saved_spec.algorithm and adapter_kind(spec).fits_any and field in ("rank", "alpha"):
        fix += ", start from its LoRA with start_from on LoRA Network"
    return ValueError(
        f"resume: that state was trained with {field} {_format_value(saved_value)} in {layer} and the network here has "
        f"{_format_value(value)}{scaled}; {fix}, {RESUME_OFF}"
    )


def _format_value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _describe_difference(saved_layers: Mapping[str, Any], layers: Mapping[str, Any]) -> Iterator[str]:
    for names, side in (
        ([n for n in saved_layers if n not in layers], "there"),
        ([n for n in layers if n not in saved_layers], "here"),
    ):
        if names:
            yield f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} only {side}"

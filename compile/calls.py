"""Calls of a compiled region: its place in a model during one call, its inputs and its outputs."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..models.transformer_options import READ_OUTSIDE_BLOCKS, VOLATILE, carries_code, steady
from .region import Region
from .stack import BlockWiring

# A module in its model: (its parent's `_modules`, its key there, the module).
Entry = tuple[dict[str, nn.Module | None], str, nn.Module]


def run_forward(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Body of a block's region: the class's forward, since the instance attribute calls the region."""
    return type(block).forward(block, *args, **kwargs)


def run_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Body of a model's region: the forward inside the wrappers of other nodes, if the model has one.

    Models write into the options. They get a copy made inside the graph, since all entries of a dict that is written to
    are guarded: another number of steps would need another graph.
    """
    args = tuple(value.copy() if isinstance(value, dict) else value for value in args)
    kwargs = {key: value.copy() if isinstance(value, dict) else value for key, value in kwargs.items()}
    model_class = type(model)
    return (model_class._forward if hasattr(model_class, "_forward") else model_class.forward)(model, *args, **kwargs)


def call_block(region: Region, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replacement of a block's forward."""
    return _call(region, block, VOLATILE, args, kwargs)


def call_model(region: Region, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replacement of the model's forward."""
    return _call(region, model, VOLATILE - READ_OUTSIDE_BLOCKS, args, kwargs)


def _call(
    region: Region, module: nn.Module, drop: frozenset[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    args = tuple(_steady(value, drop) for value in args)
    kwargs = {key: _steady(value, drop) for key, value in kwargs.items()}
    plain = not any(isinstance(v, dict) and carries_code(v) for v in (*args, *kwargs.values()))
    return _clone_outputs(region, region(module, args, kwargs, may_measure=plain))


def call_stack(
    region: Region, blocks: tuple[nn.Module, ...], wiring: BlockWiring, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Replacement of a list of blocks that no code of other nodes reaches into."""
    args, kwargs = tuple(map(_steady, args)), {key: _steady(value) for key, value in kwargs.items()}
    return _clone_outputs(region, region(blocks, wiring, args, kwargs, may_measure=True))


def _steady(value: Any, drop: frozenset[str] = VOLATILE) -> Any:
    """Normalise an argument to the layout that every block gets.

    The first block's tokens are often a transposed convolution output, which would need a second graph for each size.
    """
    if isinstance(value, tuple):
        return tuple(_steady(inner, drop) for inner in value)
    if isinstance(value, dict):
        return steady(value, drop)
    if isinstance(value, Tensor) and value.ndim == 3 and 0 not in value.stride():
        return value.contiguous()
    return value


def _clone_outputs(region: Region, out: Any) -> Any:
    """Clone the outputs of a CUDA graph, which its next run overwrites."""
    if region.options.cuda_graphs() and region.device.type == "cuda":
        return tree_map_only(Tensor, torch.clone, out)
    return out


def entry_of(model: nn.Module, name: str) -> Entry:
    """Locate a module."""
    parent, _, key = name.rpartition(".")
    modules = model.get_submodule(parent)._modules
    module = modules[key]
    assert module is not None
    return modules, key, module


def set_temporarily(placed: ExitStack, module: Any, name: str, value: Any) -> None:
    """Set an attribute of the instance until `placed` closes, which restores the previous state."""
    attributes = vars(module)
    if name in attributes:
        placed.callback(attributes.__setitem__, name, attributes[name])
    else:
        placed.callback(attributes.pop, name, None)
    attributes[name] = value

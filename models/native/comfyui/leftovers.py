"""State that sampling leaves on a model: caches of prompts, shapes of latents, handles of its memory.

Training must not see it, or a preview would change the training and a resumed run would differ. A fresh model of the
same class and sizes on the meta device shows the initial attributes.
"""

import copy
import enum
import logging
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

# Attributes of one object as its constructor sets them: None, False, 0 or an empty container; _FILLED for other values.
Fresh = Mapping[str, Any]

OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum)
_SETTINGS = (
    *(*_PLAIN, type, torch.dtype, torch.device, nn.Module),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
)
_FILLED = object()
_fresh_by_config: dict[Any, dict[str, Fresh] | None] = {}


def fresh_attributes(model: Any) -> dict[str, Fresh] | None:
    """Return the attributes of a fresh model, under "", and of the modules of its diffusion model, by name.

    None for a model that can't be made from its configuration. model: a BaseModel.
    """
    config = model.model_config
    key = type(model), type(config), repr(sorted(config.unet_config.items(), key=str))
    if key not in _fresh_by_config:
        _fresh_by_config[key] = _make(model)
    return _fresh_by_config[key]


def _make(model: Any) -> dict[str, Fresh] | None:
    config: Any = object.__new__(type(model.model_config))  # copy.copy trips over its __getattr__
    vars(config).update(vars(model.model_config))
    config.unet_config = dict(config.unet_config)
    level = logging.root.manager.disable
    logging.disable(max(level, logging.INFO))  # it would log the loaded model again
    try:
        fresh = config.get_model({}, "", device=torch.device("meta"))
        module_tables = {
            f"diffusion_model.{name}".rstrip("."): vars(m) for name, m in fresh.diffusion_model.named_modules()
        }
    except Exception:  # a class of another pack may not support this
        logging.getLogger(__name__).debug("no fresh %s", type(model).__name__, exc_info=True)
        return None
    finally:
        logging.disable(level)
    if type(fresh) is not type(model):
        return None
    return {name: _empty_ones(table) for name, table in {"": vars(fresh), **module_tables}.items()}


def _empty_ones(table: Mapping[str, Any]) -> Fresh:
    return {name: value if _is_empty(value) else _FILLED for name, value in table.items() if name not in OF_TORCH}


def _is_empty(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, list, tuple, dict, set)) and not value


def is_setting(value: Any, kinds: tuple[type, ...] = _SETTINGS) -> bool:
    """Return whether a loader or another node may have set the value: no tensor, no size, no handle."""
    if isinstance(value, torch.Size):
        return False
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_setting(inner, kinds) for inner in value)
    if isinstance(value, dict):
        return all(is_setting(inner, kinds) for inner in value.values())
    return isinstance(value, kinds)


def module_leftovers(module: nn.Module, fresh: Fresh | None) -> dict[str, Any]:
    """Collect `leftovers` of a module; loaders set plain values on ComfyUI's layers, such as a quantised format."""
    return leftovers(vars(module), fresh, settings_too=True, counters=not hasattr(module, "comfy_cast_weights"))


def leftovers(
    table: Mapping[str, Any], fresh: Fresh | None, settings_too: bool = False, counters: bool = True
) -> dict[str, Any]:
    """Collect the attributes that hold state of a sample, with their fresh values; ABSENT for those without one.

    table: attributes of a model or a module; those of torch, parameters among them, are left out.
    settings_too: include a cache's settings, such as the dtype that it was made for.
    counters: include plain values that the constructor sets to 0, False or nothing, such as a counter of calls.
    """
    if fresh is None:
        return {name: None for name, value in table.items() if name not in OF_TORCH and _holds_sizes(value)}
    fresh_values = {}
    for name, value in table.items():
        initial = fresh.get(name, ABSENT)
        if name in OF_TORCH or name.startswith("_tessera") or initial is _FILLED:
            continue
        declared = counters and initial is not ABSENT and is_setting(value, _PLAIN)
        if (value != initial) if declared else not is_setting(value):
            fresh_values[name] = copy.copy(initial)
    if fresh_values and settings_too:
        plain = {name: initial for name, initial in fresh.items() if initial is not _FILLED and name in table}
        fresh_values |= {name: copy.copy(initial) for name, initial in plain.items() if table[name] is not initial}
    return fresh_values


def _holds_sizes(value: Any) -> bool:
    if isinstance(value, list | tuple) and value and not isinstance(value, torch.Size):
        return all(isinstance(inner, torch.Size) for inner in value)
    return isinstance(value, torch.Size)


class _Absent:
    def __copy__(self) -> "_Absent":
        return self


ABSENT = _Absent()


def reset(table: dict[str, Any], fresh_values: Mapping[str, Any]) -> None:
    """Write the fresh values of `leftovers` into a table of attributes."""
    for name, value in fresh_values.items():
        if value is ABSENT:
            table.pop(name, None)
        else:
            table[name] = value


def as_loaded(model: Any) -> Any:
    """Copy a BaseModel and its diffusion model shallowly, without state left by sampling on either."""
    fresh = fresh_attributes(model) or {}
    outer, inner = copy.copy(model), copy.copy(model.diffusion_model)
    outer._modules = {**model._modules, "diffusion_model": inner}
    reset(vars(outer), leftovers(vars(outer), fresh.get("")))
    reset(vars(inner), module_leftovers(inner, fresh.get("diffusion_model")))
    return outer


def cannot_be_copied(value: Any) -> bool:
    """Return whether the value is a lock, a stream, or a handle of foreign code."""
    if isinstance(value, (*_SETTINGS, Tensor, list, tuple, dict, set)):
        return False
    try:
        value.__reduce_ex__(4)
    except Exception:
        return True
    return False
